"""Prompts with Parallel Model behind a loader of ComfyUI, and a small model for them."""

from typing import Any

import torch
from helpers.executor import Prompt
from natives.files import FILE_CASES

CASE = FILE_CASES["sd3 3.5 medium"]
"""A family whose sizes ComfyUI reads from the file."""
SHIFT, DEFAULT_SHIFT = 5.0, 3.0
"""Of ModelSamplingSD3 in the prompts, and of the family without it."""


REPLACING = {"class_type": "PerturbedAttentionGuidance", "inputs": {"model": ["1", 0], "scale": 3.0}}


def prompt(model: str, *, seed: int = 5, shift: float = SHIFT, sampler: str = "KSampler", **changes: Any) -> Prompt:
    """Return a prompt whose sampler takes its model from the node ``model``."""
    sampling = {
        "seed": seed, "steps": 3, "cfg": 4.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0,
        "model": [model, 0], "positive": ["4", 0], "negative": ["5", 0], "latent_image": ["6", 0],
    }  # fmt: skip
    nodes: Prompt = {
        "1": {"class_type": "UNETLoader", "inputs": {"unet_name": "tiny.safetensors", "weight_dtype": "default"}},
        "2": {"class_type": "ModelSamplingSD3", "inputs": {"model": ["1", 0], "shift": shift}},
        "3": {"class_type": "ParallelModel", "inputs": {"model": ["2", 0], "devices": "0,1", "attention": "auto"}},
        "4": {"class_type": "Given", "inputs": {"key": "positive"}},
        "5": {"class_type": "Given", "inputs": {"key": "negative"}},
        "6": {"class_type": "Given", "inputs": {"key": "latent"}},
        "7": {"class_type": sampler, "inputs": sampling},
        "8": {"class_type": "Recorder", "inputs": {"value": ["7", 0]}},
    }
    return nodes | changes


def latent(result: list[Any]) -> torch.Tensor:
    samples: torch.Tensor = result[0]["samples"]
    return samples
