"""Run the quickstart's workflows without ComfyUI, through the backend's client.

All settings come from the workflows. Noise and schedule, which ComfyUI's own functions make otherwise, take one line
each here for a flow model.
"""

import os
import shutil
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from parallel_backend.checkpoint.opening import open_checkpoint
from parallel_backend.client.client import Client
from parallel_backend.client.devices import parse_devices
from parallel_backend.protocol.messages import Decode, EncodeText, Sample
from parallel_backend.protocol.model_spec import ModelSpec
from scripts import processes
from scripts.comfy_api import Prompt
from scripts.comfy_paths import ROOT
from scripts.quickstart.runner import Frames

CHECKPOINT = ROOT / "checkpoints" / "shapes"
SHIFT = 8.0
TEXT_LENGTH = 512


def schedule(steps: int) -> Tensor:
    """Sigmas ``[steps + 1]`` of a flow model with timestep shift ``SHIFT``, from 1 to 0."""
    t = torch.linspace(1, 0, steps + 1)
    return SHIFT * t / (1 + (SHIFT - 1) * t)


def node(prompt: Prompt, *class_types: str) -> dict[str, Any]:
    """The inputs of the first node whose class is in ``class_types``."""
    inputs: dict[str, Any] = next(n["inputs"] for n in prompt.values() if n["class_type"] in class_types)
    return inputs


class ThroughClient:
    """Runs a backend while the ``with`` block runs."""

    def __init__(self) -> None:
        self._runtime = Path(tempfile.mkdtemp(prefix="pdit-", dir="/tmp"))
        os.environ[processes.RUNTIME] = str(self._runtime)
        self._client = Client()
        self._checkpoint = open_checkpoint(CHECKPOINT)
        self._tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer" / "tokenizer.json"))

    def run(self, prompt: Prompt) -> tuple[float, Frames]:
        """See ``Runner.run``."""
        started = time.monotonic()
        spec = ModelSpec(path=str(CHECKPOINT), devices=parse_devices(node(prompt, "ParallelLoader")["devices"]))
        sampler = node(prompt, "KSampler", "ParallelSampler")
        texts = [prompt[sampler[name][0]]["inputs"]["text"] for name in ("positive", "negative")]
        tensors = {"x": self._noise(node(prompt, "EmptyHunyuanLatentVideo"), sampler["seed"])}
        tensors["sigmas"] = schedule(sampler["steps"])
        for i, text in enumerate(texts):
            tensors[f"{i}.encoder_hidden_states"] = self._encode(spec, text)
        message = Sample(model=spec, branches=2, sampler=sampler["sampler_name"], cfg=sampler["cfg"])
        samples = self._client.call(message, tensors)["samples"]
        pixels = self._client.call(Decode(model=spec), {"latent": self._denormalise(samples)})["pixels"]
        frames = (pixels.flatten(0, 1) * 255).round().to(torch.uint8).numpy()
        return time.monotonic() - started, np.asarray(frames)

    def _noise(self, size: dict[str, Any], seed: int) -> Tensor:
        shape = (size["batch_size"], 16, (size["length"] - 1) // 4 + 1, size["height"] // 8, size["width"] // 8)
        return torch.randn(shape, generator=torch.manual_seed(seed), dtype=torch.float32)

    def _encode(self, spec: ModelSpec, text: str) -> Tensor:
        ids = torch.tensor([self._tokenizer.encode(text).ids])
        tensors = {"ids": ids, "lengths": torch.tensor([ids.shape[1]])}
        embeds = self._client.call(EncodeText(model=spec), tensors)["embeds"]
        return torch.nn.functional.pad(embeds, (0, 0, 0, TEXT_LENGTH - embeds.shape[1]))

    def _denormalise(self, samples: Tensor) -> Tensor:
        config = self._checkpoint.config("vae")
        mean, std = (torch.tensor(config[key]).view(1, -1, 1, 1, 1) for key in ("latents_mean", "latents_std"))
        return samples * std + mean

    def __enter__(self) -> "ThroughClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            processes.stop_backend(self._runtime)
        finally:
            processes.kill(processes.wait_for_exit(self._runtime, 15.0))
            shutil.rmtree(self._runtime, ignore_errors=True)
