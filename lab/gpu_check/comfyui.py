"""A model file in a real ComfyUI: its own KSampler against Parallel Model and ParallelSampler, on the same device.

Prints the seconds of a warm prompt by way, and how far each way's latent is from ComfyUI's own.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor

from lab.bench.model_file import TEXT, write_wan
from lab.gpu_check.timing import device
from scripts import comfy_paths
from scripts.comfy_api import File, Prompt, Result
from scripts.comfy_server import ComfyServer

FILE = "check.safetensors"
OWN, WRAPPED, OURS = "ComfyUI alone", "Parallel Model", "Parallel Sampler"
OFF = ", off by"
DTYPES = {"float32": ("--force-fp32",), "bfloat16": ("--bf16-unet",)}
"""ComfyUI's arguments by the dtype in which the model then runs."""
LIMITS = {"float32": 1e-4, "bfloat16": 5e-2}
"""Largest relative difference of a latent, by dtype."""
START = 300.0
"""Seconds of a prompt that starts ranks and loads the model."""
NODES = f"""
import torch

class SomeText:
    INPUT_TYPES = classmethod(lambda cls: {{"required": {{"seed": ("INT", {{"default": 0}})}}}})
    RETURN_TYPES, FUNCTION, CATEGORY = ("CONDITIONING",), "make", "check"

    def make(self, seed):
        return ([[torch.randn(1, 77, {TEXT}, generator=torch.Generator().manual_seed(seed)), {{}}]],)

NODE_CLASS_MAPPINGS = {{"SomeText": SomeText}}
"""
"""An extension with a prompt without text encoders."""


def workflow(way: str, seed: int, *, side: int, steps: int) -> Prompt:
    """Return a prompt of one image of ``side`` pixels with guidance."""
    model: dict[str, Any] = {"class_type": "UNETLoader", "inputs": {"unet_name": FILE, "weight_dtype": "default"}}
    if way == OURS:
        inputs = {"model_name": f"diffusion_models/{FILE}", "dtype": "auto", "devices": "0"}
        model = {"class_type": "ParallelLoader", "inputs": inputs}
    sampling = {
        "model": ["wrapped" if way == WRAPPED else "model", 0], "positive": ["text", 0], "negative": ["empty", 0],
        "latent_image": ["latent", 0], "seed": seed, "steps": steps, "cfg": 4.0, "sampler_name": "euler",
        "scheduler": "simple", "denoise": 1.0,
    }  # fmt: skip
    size = {"width": side, "height": side, "length": 1, "batch_size": 1}
    nodes: Prompt = {
        "model": model,
        "text": {"class_type": "SomeText", "inputs": {"seed": 1}},
        "empty": {"class_type": "SomeText", "inputs": {"seed": 2}},
        "latent": {"class_type": "EmptyHunyuanLatentVideo", "inputs": size},
        "sample": {"class_type": "ParallelSampler" if way == OURS else "KSampler", "inputs": sampling},
        "save": {"class_type": "SaveLatent", "inputs": {"samples": ["sample", 0], "filename_prefix": "check"}},
    }
    if way == WRAPPED:
        nodes["wrapped"] = {
            "class_type": "ParallelModel", "inputs": {"model": ["model", 0], "devices": "0", "attention": "auto"},
        }  # fmt: skip
    return nodes


def main() -> int:
    """Print the figures as JSON, and fail if a latent differs too much."""
    found = comfy_paths.candidates()[:1]
    if not found:
        print(json.dumps({"ComfyUI": "left out: none is installed"}))
        return 0
    figures = {dtype: _measure(found[0], dtype) for dtype in DTYPES}
    print(json.dumps(figures))
    return int(any(_fails(dtype, each) for dtype, each in figures.items()))


def _fails(dtype: str, figures: Mapping[str, float]) -> bool:
    return any(not value <= LIMITS[dtype] for name, value in figures.items() if name.endswith(OFF))


def _measure(comfyui: Path, dtype: str) -> dict[str, float]:
    """Return seconds and differences by way, in one ComfyUI."""
    on_card = device().type == "cuda"
    heads, layers, side, steps = (12, 8, 1024, 10) if on_card else (2, 2, 80, 3)
    server = ComfyServer(comfyui, cpu=not on_card, arguments=DTYPES[dtype])
    models, extensions = server.base / "models" / "diffusion_models", server.base / "custom_nodes"
    for folder in (models, extensions):
        folder.mkdir(parents=True, exist_ok=True)
    write_wan(models / FILE, heads=heads, layers=layers)
    (extensions / "check.py").write_text(NODES, encoding="utf-8")
    figures: dict[str, float] = {}
    with server:
        expected: Tensor | None = None
        for way in (OWN, WRAPPED, OURS):
            for seed in (1, 2):
                result = server.client.run(workflow(way, seed, side=side, steps=steps), deadline=START)
                print(f"{dtype}, {way}: {result.seconds:.2f} s", flush=True)
            latent = _latent(server, result)
            expected = latent if expected is None else expected
            figures |= {f"{way}, s": result.seconds, f"{way}{OFF}": _difference(latent, expected)}
    return figures


def _latent(server: ComfyServer, result: Result) -> Tensor:
    (entry,) = result.outputs["save"]["latents"]
    file = File(filename=entry["filename"], subfolder=entry["subfolder"], type=entry["type"])
    return load(server.client.fetch(file))["latent_tensor"].float()


def _difference(latent: Tensor, expected: Tensor) -> float:
    return float((latent - expected).norm() / expected.norm()) if torch.isfinite(latent).all() else float("inf")


if __name__ == "__main__":
    sys.exit(main())
