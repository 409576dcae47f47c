"""Prompts in API format for the tiny random checkpoints of ``tiny_server``."""

from typing import Any

from scripts.comfy_api import Prompt

START = 280.0
"""Seconds for a prompt that starts ranks on a busy machine."""

LAYOUT = {"data": 1, "cfg": 1, "pipe": 1, "ring": 1, "ulysses": 1, "tensor": 1}


def prompt(sampler: str = "KSampler", *, layout: dict[str, Any] | None = None, **changes: Any) -> Prompt:
    """Return a prompt from text to image. ``changes`` replace inputs by name in every node that has them."""
    nodes: Prompt = {
        "1": {"class_type": "ParallelLoader", "inputs": {"model_name": "tiny", "dtype": "fp32", "devices": "0,1"}},
        "2": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["1", 1], "text": "a red circle"}},
        "3": {"class_type": "CLIPTextEncode", "inputs": {"clip": ["1", 1], "text": ""}},
        "4": {"class_type": "EmptyHunyuanLatentVideo",
              "inputs": {"width": 80, "height": 64, "length": 1, "batch_size": 1}},
        "5": {"class_type": sampler,
              "inputs": {"model": ["1", 0], "positive": ["2", 0], "negative": ["3", 0], "latent_image": ["4", 0],
                         "seed": 3, "steps": 3, "cfg": 4.0, "sampler_name": "euler", "scheduler": "simple",
                         "denoise": 1.0}},
        "6": {"class_type": "VAEDecode", "inputs": {"samples": ["5", 0], "vae": ["1", 2]}},
        "7": {"class_type": "SaveImage", "inputs": {"images": ["6", 0], "filename_prefix": "nodes"}},
    }  # fmt: skip
    for name, value in changes.items():
        for node in nodes.values():
            if name in node["inputs"]:
                node["inputs"][name] = value
    if layout is not None:
        nodes["8"] = {"class_type": "ParallelLayout", "inputs": {**LAYOUT, **layout}}
        nodes["1"]["inputs"]["layout"] = ["8", 0]
    return nodes


def with_custom_sampler(simple: Prompt) -> Prompt:
    """Return the same prompt with SamplerCustomAdvanced and the nodes that it needs."""
    sampler_inputs = simple["5"]["inputs"]
    model = {"model": sampler_inputs["model"]}
    guidance = {name: sampler_inputs[name] for name in ("positive", "negative", "cfg")}
    schedule = {name: sampler_inputs[name] for name in ("scheduler", "steps", "denoise")}
    custom_nodes: Prompt = {
        "20": {"class_type": "RandomNoise", "inputs": {"noise_seed": sampler_inputs["seed"]}},
        "21": {"class_type": "CFGGuider", "inputs": model | guidance},
        "22": {"class_type": "KSamplerSelect", "inputs": {"sampler_name": sampler_inputs["sampler_name"]}},
        "23": {"class_type": "BasicScheduler", "inputs": model | schedule},
        "5": {"class_type": "SamplerCustomAdvanced",
              "inputs": {"noise": ["20", 0], "guider": ["21", 0], "sampler": ["22", 0], "sigmas": ["23", 0],
                         "latent_image": sampler_inputs["latent_image"]}},
    }  # fmt: skip
    return simple | custom_nodes
