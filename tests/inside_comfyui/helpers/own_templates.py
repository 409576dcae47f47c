"""The example workflows in small: without text encoders and files of pictures, with recorders for outputs."""

from typing import Any

import torch
from helpers.executor import Given, Prompt

LEFT_OUT = ("Save", "CreateVideo", "VAEDecodeAudio")
"""Beginnings of classes whose outputs are not looked at."""
TEXT_ENCODERS = ("CLIPLoader", "DualCLIPLoader")
PASSED = {"ParallelModel": "model", "ParallelVAE": "vae"}
"""What our nodes pass on when they are bypassed."""
SMALL = {"width": 72, "height": 88, "length": 9, "steps": 4, "end_at_step": 2, "start_at_step": 2}
"""Values that replace a workflow's. The first sampler of two ends, and the second one begins, in the middle."""
SMALLER: dict[str, dict[str, int]] = {
    # ComfyUI's own takes even sizes only, and its VAE lets other frames attend to each other than the model's does.
    "HunyuanVideo, text to video": {"width": 80, "height": 96, "length": 1},
}
"""Other values than those of ``SMALL``, by workflow."""
PICTURE = {"width": 64, "height": 80, "upscale_method": "area", "crop": "disabled"}


class StandInClip:
    """A CLIP that knows two texts: one that is empty, and another one."""

    def tokenize(self, text: str, **options: Any) -> str:
        """Return the text behind the places of pictures."""
        return text.rpartition("<|vision_end|>")[2]

    def encode_from_tokens_scheduled(self, tokens: str) -> Any:
        """Return the conditioning of a text."""
        return Given.values["text" if tokens else "other text"]


def small(name: str, prompt: Prompt) -> Prompt:
    """Return a workflow of small size, with recorders of latents and pixels for outputs."""
    Given.values |= {"clip": StandInClip(), "picture": torch.rand(1, 96, 80, 3, generator=torch.manual_seed(9))}
    sizes, kept = SMALL | SMALLER.get(name, {}), Prompt()
    for key, node in prompt.items():
        kind = node["class_type"]
        inputs = {each: _smaller(sizes, each, value) for each, value in node["inputs"].items()}
        if kind.endswith("VAEDecode"):
            kept["latent"] = {"class_type": "Recorder", "inputs": {"value": inputs["samples"]}}
            kept["pixels"] = {"class_type": "Recorder", "inputs": {"value": [key, 0]}}
        if not kind.startswith(LEFT_OUT):
            kept[key] = _replaced(kind, inputs)
    return kept


def _smaller(sizes: dict[str, int], name: str, value: Any) -> Any:
    return sizes[name] if name in sizes and isinstance(value, int) and 0 < value < 10_000 else value


def _replaced(kind: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return what stands in a test for a node of text or pictures, whose files are not made."""
    given = {"LoadImage": "picture"} | dict.fromkeys(TEXT_ENCODERS, "clip")
    if kind == "CLIPTextEncode":
        return {"class_type": "Given", "inputs": {"key": "text" if inputs["text"][0] == "a" else "other text"}}
    if kind in given:
        return {"class_type": "Given", "inputs": {"key": given[kind]}}
    if kind == "FluxKontextImageScale":  # to a million pixels
        return {"class_type": "ImageScale", "inputs": {"image": inputs["image"], **PICTURE}}
    return {"class_type": kind, "inputs": inputs}


def without_our_nodes(prompt: Prompt, models: dict[str, Any]) -> Prompt:
    """Return a workflow in which our nodes are bypassed, and our loader and sampler are ComfyUI's.

    Args:
        prompt: the workflow.
        models: ComfyUI's own models by the files that they are in. It loads those of checkpoints by itself.
    """
    replaced = {"ParallelSampler": "KSampler", "ParallelVAEDecode": "VAEDecode"}
    native: Prompt = {}
    for key, node in prompt.items():
        kind, inputs = replaced.get(node["class_type"], node["class_type"]), dict(node["inputs"])
        inputs.pop("tile", None)
        if kind in ("ParallelLoader", "UNETLoader"):
            name = inputs.get("unet_name") or next(iter(models))
            Given.values[name] = models[name]
            kind, inputs = "Given", {"key": name}
        native[key] = {"class_type": kind, "inputs": {name: bypassed(prompt, value) for name, value in inputs.items()}}
    return {key: node for key, node in native.items() if node["class_type"] not in PASSED}


def bypassed(prompt: Prompt, value: Any) -> Any:
    """Return a link as the page makes it when our nodes before it are bypassed."""
    while isinstance(value, list) and prompt[value[0]]["class_type"] in PASSED:
        node = prompt[value[0]]
        value = node["inputs"][PASSED[node["class_type"]]]
    return value
