"""The prompts: a model, a way to sample it, and what changes from one prompt to the next."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from parallel_backend.checkpoint.safetensors_file import read_header
from scripts.comfy_api import Prompt

from ..model_file import TEXT, write_wan

SHAPES, FILE = "shapes", "file"
OWN, WRAPPED, NATIVE, OURS = "ComfyUI alone", "Parallel Model", "Parallel Loader", "Parallel Sampler"
WAYS = {SHAPES: (OURS, NATIVE), FILE: (OWN, WRAPPED, NATIVE, OURS)}
"""By model, the first is what the others are compared with. ComfyUI alone does not read the shipped checkpoint."""
MODEL_FILE, LORA_FILE, RANK = "bench.safetensors", "bench-lora.safetensors", 8
SHIPPED = Path(__file__).resolve().parents[3] / "checkpoints" / "shapes" / "transformer"
TEXT_NODE = f"""
import time, torch

class BenchText:
    INPUT_TYPES = classmethod(lambda cls: {{"required": {{"text": ("STRING", {{}}), "seconds": ("FLOAT", {{}})}}}})
    RETURN_TYPES, FUNCTION, CATEGORY = ("CONDITIONING",), "make", "bench"

    def make(self, text, seconds):
        time.sleep(seconds)
        seed = sum(text.encode())
        return ([[torch.randn(1, 256, {TEXT}, generator=torch.Generator().manual_seed(seed)), {{}}]],)

NODE_CLASS_MAPPINGS = {{"BenchText": BenchText}}
"""
"""An extension whose texts need no text encoder: ``write_wan`` makes a transformer alone."""


@dataclass(frozen=True, kw_only=True)
class Graph:
    """Prompts of one model, sampled in one way.

    Attributes:
        model: ``SHAPES``, the shipped checkpoint with text encoder and VAE, or ``FILE``, a transformer's random file.
        way: one of ``WAYS``.
        devices: of the ranks.
        steps: of a prompt.
        cfg: the guidance.
        lora: whether a LoRA changes the model.
        side: of the picture, in pixels.
        text_seconds: how long ComfyUI takes for a text of ``FILE``.
    """

    model: str
    way: str
    devices: str
    steps: int
    cfg: float
    lora: bool
    side: int
    text_seconds: float = 0.0

    def prompt(self, seed: int, text: str) -> Prompt:
        """Return the prompt with a seed and a text. Nodes that two ways share have one name and one result."""
        sampling = {
            "model": ["lora" if self.lora else self._model, 0], "positive": ["text", 0], "negative": ["empty", 0],
            "latent_image": ["latent", 0], "seed": seed, "steps": self.steps, "cfg": self.cfg,
            "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0,
        }  # fmt: skip
        size = {"width": self.side, "height": self.side, "length": 1, "batch_size": 1}
        nodes = self._loaders() | {
            "text": self._text(text),
            "empty": self._text(""),
            "latent": {"class_type": "EmptyHunyuanLatentVideo", "inputs": size},
            "sample": {"class_type": "ParallelSampler" if self.way == OURS else "KSampler", "inputs": sampling},
        }
        return nodes | self._outputs()

    @property
    def _model(self) -> str:
        return {OWN: "file", WRAPPED: "wrapped"}.get(self.way, "loader")

    def _loaders(self) -> Prompt:
        name = "shapes (shipped)" if self.model == SHAPES else f"diffusion_models/{MODEL_FILE}"
        ours = {"model_name": name, "dtype": "auto", "devices": self.devices, "attention": "auto"}
        file = {"unet_name": MODEL_FILE, "weight_dtype": "default"}
        wrapped = {"model": ["file", 0], "devices": self.devices, "attention": "auto"}
        lora = {"lora_name": LORA_FILE, "strength_model": 0.5, "model": [self._model, 0]}
        nodes: dict[str, dict[str, Any]] = {
            "loader": {"class_type": "ParallelLoader", "inputs": ours},
            "file": {"class_type": "UNETLoader", "inputs": file},
            "wrapped": {"class_type": "ParallelModel", "inputs": wrapped},
            "lora": {"class_type": "LoraLoaderModelOnly", "inputs": lora},
        }
        names = {OWN: ("file",), WRAPPED: ("file", "wrapped")}.get(self.way, ("loader",))
        return {name: nodes[name] for name in (*names, *(("lora",) if self.lora else ()))}

    def _text(self, text: str) -> dict[str, Any]:
        if self.model == FILE:
            return {"class_type": "BenchText", "inputs": {"text": text, "seconds": self.text_seconds}}
        return {"class_type": "CLIPTextEncode", "inputs": {"clip": ["loader", 1], "text": text}}

    def _outputs(self) -> Prompt:
        if self.model == FILE:
            inputs = {"samples": ["sample", 0], "filename_prefix": "bench"}
            return {"save": {"class_type": "SaveLatent", "inputs": inputs}}
        return {
            "decode": {"class_type": "VAEDecode", "inputs": {"samples": ["sample", 0], "vae": ["loader", 2]}},
            "save": {"class_type": "SaveImage", "inputs": {"images": ["decode", 0], "filename_prefix": "bench"}},
        }


def write_files(base: Path, model: str, *, heads: int, layers: int) -> None:
    """Write the model's files, a LoRA for it, and the node of its texts into ComfyUI's folders."""
    folders = {name: base / name for name in ("models/diffusion_models", "models/loras", "custom_nodes")}
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    file = folders["models/diffusion_models"] / MODEL_FILE
    if model == FILE:
        write_wan(file, heads=heads, layers=layers)
        (folders["custom_nodes"] / "bench_text.py").write_text(TEXT_NODE, encoding="utf-8")
    _write_lora(folders["models/loras"] / LORA_FILE, file if model == FILE else None)


def _write_lora(path: Path, file: Path | None) -> None:
    """Write a LoRA for the attention of each block. ``file`` is the model's, None for the shipped checkpoint's."""
    source = next(SHIPPED.glob("*.safetensors")) if file is None else file
    attention = "attn1.to_q.weight" if file is None else "self_attn.q.weight"
    random, tensors = torch.Generator().manual_seed(0), {}
    for name, stored in read_header(source).tensors.items():
        if name.endswith(attention):
            rows, columns = stored.shape
            layer = f"diffusion_model.{name.removesuffix(attention)}self_attn.q"
            tensors[f"{layer}.lora_A.weight"] = torch.randn(RANK, columns, generator=random) * 0.05
            tensors[f"{layer}.lora_B.weight"] = torch.randn(rows, RANK, generator=random) * 0.05
    save_file(tensors, path)
