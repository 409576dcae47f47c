"""Runs a mixture in ComfyUI alone and with our nodes, and compares the latents."""

import copy
import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import comfy.model_detection
import comfy.sd
import folder_paths
import pytest
import torch
from helpers.executor import Executor, Given, NodeFailed, Prompt
from helpers.inside_fixtures import relative_error
from helpers.sensitivity import CHANGES, ROUNDING
from mixtures.drawing import Mixture
from mixtures.graph import alone
from natives.loadable import CASES, file_name, with_assumed_sizes, write
from safetensors.torch import save_file

CLOSE = 1e-5
"""The largest difference of equal results, unless ComfyUI's own result depends on rounding more than that."""
CHAOTIC = 1e-2
"""A larger difference than rounding may make in a result that says anything."""
REFUSALS = ("InvalidRequest", "Unavailable")
Kind = Literal["equal", "refused", "invalid", "differs", "fails"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a mixture.

    Attributes:
        kind: ``refused``: by a sentence of ours. ``invalid``: ComfyUI alone fails, or gives what rounding decides.
            ``fails``: only ours fails.
        text: the difference, or the error.
        error: the relative difference; 0 where there is none.
    """

    kind: Kind
    text: str
    error: float = 0.0

    @property
    def wrong(self) -> bool:
        """Whether ours does not do what it should."""
        return self.kind in ("differs", "fails")


class Runner:
    """Runs mixtures.

    Args:
        folder: takes the models' and LoRAs' files, and is ComfyUI's folder of both.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for kind in ("diffusion_models", "loras"):
            folder_paths.folder_names_and_paths[kind][0][:] = [str(folder)]

    def run(self, mixture: Mixture) -> Outcome:
        """Return what comes of a mixture."""
        self._write(mixture)
        Given.values = mixture.given
        try:
            return self._compare(mixture)
        finally:
            Given.values = {}
            gc.collect()  # ComfyUI's executor and its models are part of cycles

    def _write(self, mixture: Mixture) -> None:
        for name in mixture.names:
            write(name, self.folder)
        for lora in mixture.loras:
            if not (self.folder / lora.name).exists():
                save_file({name: each.contiguous() for name, each in lora.factors().items()}, self.folder / lora.name)
        folder_paths.filename_list_cache.clear()

    def _compare(self, mixture: Mixture) -> Outcome:
        try:
            wanted = _native(mixture)
        except NodeFailed as error:
            return Outcome(kind="invalid", text=f"ComfyUI alone: {error.kind}: {_line(error)}")
        if not all(each.isfinite().all() for each in wanted):
            return Outcome(kind="invalid", text="ComfyUI alone: the latent is not finite")
        try:
            found = _sampled(mixture.prompt)
        except NodeFailed as error:
            refused = error.kind.rpartition(".")[2] in REFUSALS
            return Outcome(kind="refused" if refused else "fails", text=f"{error.kind}: {_line(error)}")
        return self._judged(mixture, wanted, found)

    def _judged(self, mixture: Mixture, wanted: list[torch.Tensor], found: list[torch.Tensor]) -> Outcome:
        if [each.shape for each in found] != [each.shape for each in wanted]:
            return Outcome(kind="differs", text=f"shapes {[tuple(each.shape) for each in found]}", error=torch.inf)
        error = _difference(found, wanted)
        if error <= CLOSE:
            return Outcome(kind="equal", text=f"{error:.1e}", error=error)
        limit = ROUNDING * max(_difference(_native(mixture, change), wanted) for change in CHANGES)
        text = f"{error:.1e}, where rounding may make {limit:.1e}"
        if limit > CHAOTIC:
            return Outcome(kind="invalid", text=f"ComfyUI alone: rounding decides: {text}")
        return Outcome(kind="equal" if error <= limit else "differs", text=text, error=error)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _difference(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    return max(relative_error(*pair) for pair in zip(found, wanted, strict=True))


def _sampled(prompt: Prompt) -> list[torch.Tensor]:
    """Return the latents of a prompt, in the order of its nodes, in an executor that has nothing cached."""
    executor = Executor()
    kept = executor.run(copy.deepcopy(prompt))  # ComfyUI adds to it
    ran = [node for node in executor.executed if prompt.get(node, {}).get("class_type") == "Recorder"]
    return [each["samples"] for _, each in sorted(zip(map(int, ran), kept, strict=True), key=lambda pair: pair[0])]


def _native(mixture: Mixture, change: float = 1.0) -> list[torch.Tensor]:
    """Return what ComfyUI alone samples where its predictions change by a factor."""
    load = comfy.sd.load_diffusion_model

    def load_changed(path: str, **options: Any) -> Any:
        model = load(path, **options)
        module = model.model.diffusion_model
        next(CASES[name] for name in mixture.names if file_name(name) == Path(path).name).repair(module)
        if change != 1.0:
            module.register_forward_hook(lambda module, args, prediction: prediction * change)
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comfy.sd, "load_diffusion_model", load_changed)
        return _sampled(alone(mixture.prompt))


def assumed_sizes(patch: pytest.MonkeyPatch) -> None:
    """Let ComfyUI detect the tiny models."""
    detect: Callable[..., Any] = with_assumed_sizes(comfy.model_detection.detect_unet_config)
    patch.setattr(comfy.model_detection, "detect_unet_config", detect)
