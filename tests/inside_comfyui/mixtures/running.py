"""Runs a mixture in ComfyUI alone and with our nodes, and compares the latents."""

import copy
import gc
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import comfy.model_detection
import comfy.samplers
import comfy.sd
import folder_paths
import pytest
import torch
from any_folder_name.nodes.bridges.refusals import Unavailable
from any_folder_name.parallel_backend.errors import InvalidRequest
from helpers.executor import Executor, Given, NodeFailed, Prompt
from helpers.inside_fixtures import parts_of, relative_error
from helpers.sensitivity import CHANGES, ROUNDING, scale_predictions
from mixtures.drawing import Mixture
from mixtures.graph import alone
from natives.loadable import CASES, file_name, with_assumed_sizes, write
from safetensors.torch import save_file

CLOSE = 1e-5
"""The largest difference of equal results, unless ComfyUI's own result depends on rounding more than that."""
CHAOTIC = 1e-2
"""A larger difference than rounding may make in a result that says anything."""
ONE_AT_A_TIME = "hunyuan_video"
"""The family of which ComfyUI alone computes each prompt by itself, as it does where memory is short.

In a batch its transformer fails with masked texts, and gives prompts of another guidance the wrong video where a first
frame is given.
"""
REFUSALS = (
    "layout cfg=2 computes the positive and the negative prompt on different ranks, but this sampler call has no ",
    r"layout .* \(.*\) needs the backend's step loop, but ",
    "the LoRA changes .* as .*, which works in LoraLoader only",
    "the LoRA has a DoRA scale for .*, which LoraLoaderBypass ignores",
)
"""Beginnings of the sentences by which ours may refuse what ComfyUI alone samples, as patterns."""
OURS = tuple(f"{error.__module__}.{error.__qualname__}" for error in (InvalidRequest, Unavailable))
Kind = Literal["equal", "refused", "invalid", "differs", "fails"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a mixture.

    Attributes:
        kind: ``refused``: by one of ``REFUSALS``. ``invalid``: ComfyUI alone fails, or gives what rounding decides.
            ``fails``: only ours fails, or it refuses with another sentence.
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
        self.write(mixture)
        return _compare(mixture)

    def write(self, mixture: Mixture) -> None:
        """Write the files that a mixture names."""
        for name in mixture.names:
            write(name, self.folder)
        for lora in mixture.loras:
            if not (self.folder / lora.name).exists():
                save_file({name: each.contiguous() for name, each in lora.factors().items()}, self.folder / lora.name)
        folder_paths.filename_list_cache.clear()


def _compare(mixture: Mixture) -> Outcome:
    try:
        wanted = sample_alone(mixture)
    except NodeFailed as error:
        return Outcome(kind="invalid", text=f"ComfyUI alone: {error.kind}: {_line(error)}")
    if not _finite(wanted):
        return Outcome(kind="invalid", text="ComfyUI alone: the latent is not finite")
    try:
        found = _sampled(mixture, mixture.prompt)
    except NodeFailed as error:
        refused = error.kind in OURS and any(re.match(pattern, str(error)) for pattern in REFUSALS)
        return Outcome(kind="refused" if refused else "fails", text=f"{error.kind}: {_line(error)}")
    return judged(mixture, wanted, found)


def judged(mixture: Mixture, wanted: list[torch.Tensor], found: list[torch.Tensor]) -> Outcome:
    """Return whether latents are those of a mixture.

    Args:
        mixture: the mixture.
        wanted: ComfyUI's.
        found: ours.
    """
    if [each.shape for each in found] != [each.shape for each in wanted] or not _finite(found):
        return Outcome(kind="differs", text=f"{[tuple(each.shape) for each in found]}, or not finite", error=torch.inf)
    error = _difference(found, wanted)
    if error <= CLOSE:
        return Outcome(kind="equal", text=f"{error:.1e}", error=error)
    limit = ROUNDING * max(_difference(sample_alone(mixture, change=change), wanted) for change in CHANGES)
    text = f"{error:.1e}, where rounding may make {limit:.1e}"
    if error <= limit and limit > CHAOTIC:
        return Outcome(kind="invalid", text=f"ComfyUI alone: rounding decides: {text}")
    return Outcome(kind="equal" if error <= limit else "differs", text=text, error=error)


def _finite(latents: list[torch.Tensor]) -> bool:
    return all(bool(each.isfinite().all()) for each in latents)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())


def _difference(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> float:
    """Return the largest relative difference. ComfyUI's own latent may be all zeros."""
    return max(0.0 if torch.equal(*pair) else relative_error(*pair) for pair in zip(found, wanted, strict=True))


def _sampled(mixture: Mixture, prompt: Prompt) -> list[torch.Tensor]:
    """Return the latents of a prompt, in the order of its nodes, in an executor that has nothing cached.

    A nested latent's tensors follow each other.
    """
    executor = Executor()
    Given.values = copy.deepcopy(mixture.given)  # ComfyUI's nodes may change it
    try:
        kept = executor.run(copy.deepcopy(prompt))  # ComfyUI adds to it
    finally:
        Given.values = {}
        gc.collect()  # ComfyUI's executor and its models are part of cycles
    ran = [node for node in executor.executed if prompt.get(node, {}).get("class_type") == "Recorder"]
    latents = [each["samples"] for _, each in sorted(zip(map(int, ran), kept, strict=True), key=lambda pair: pair[0])]
    return [part for latent in latents for part in parts_of(latent)]


def sample_alone(mixture: Mixture, *, change: float = 1.0) -> list[torch.Tensor]:
    """Return what ComfyUI alone samples where its predictions change by a factor."""
    load = comfy.sd.load_diffusion_model

    def load_changed(path: str, **options: Any) -> Any:
        model = load(path, **options)
        module = model.model.diffusion_model
        next(CASES[name] for name in mixture.names if file_name(name) == Path(path).name).repair(module)
        if change != 1.0:
            scale_predictions(module, change)
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comfy.sd, "load_diffusion_model", load_changed)
        if any(name.startswith(ONE_AT_A_TIME) for name in mixture.names):
            patch.setattr(comfy.samplers, "can_concat_cond", lambda prompt, other: prompt is other)
        return _sampled(mixture, alone(mixture.prompt))


def assumed_sizes(patch: pytest.MonkeyPatch) -> None:
    """Let ComfyUI detect the tiny models."""
    detect: Callable[..., Any] = with_assumed_sizes(comfy.model_detection.detect_unet_config)
    patch.setattr(comfy.model_detection, "detect_unet_config", detect)
