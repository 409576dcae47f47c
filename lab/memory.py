"""ComfyUI's own memory with a large model file: python -m lab memory (in .venv, with a ComfyUI).

Runs one step of the same workflow in three forms: without Parallel Model, with it behind Load Diffusion Model, and with
it behind an unknown loader. Prints the peak growth of ComfyUI's process, proportional memory (``Pss`` in proc(5)), as a
part of the file's size.
"""

import argparse
from functools import partial
from pathlib import Path

from lab.bench.memory import BYTES_OF_LAYER, HEADS
from lab.bench.model_file import TEXT, write_wan
from lab.sampling import sampled
from parallel_backend import processes
from scripts import comfy_paths
from scripts.comfy_api import Prompt
from scripts.comfy_server import ComfyServer

FILE = "large.safetensors"
WAYS = ("without Parallel Model", "behind Load Diffusion Model", "behind another loader")
NODES = f"""
import comfy.sd, folder_paths, torch

class AnyConditioning:
    INPUT_TYPES = classmethod(lambda cls: {{"required": {{}}}})
    RETURN_TYPES, FUNCTION, CATEGORY = ("CONDITIONING",), "make", "measure"

    def make(self):
        return ([[torch.zeros(1, 16, {TEXT}), {{}}]],)

class AnotherLoader:
    INPUT_TYPES = classmethod(lambda cls: {{"required": {{"name": ("STRING", {{}})}}}})
    RETURN_TYPES, FUNCTION, CATEGORY = ("MODEL",), "load", "measure"

    def load(self, name):
        model = comfy.sd.load_diffusion_model(folder_paths.get_full_path("diffusion_models", name))
        model.cached_patcher_init = None
        return (model,)

NODE_CLASS_MAPPINGS = {{"AnyConditioning": AnyConditioning, "AnotherLoader": AnotherLoader}}
"""
"""An extension with a prompt without text encoders, and with an unknown loader."""


def workflow(way: str) -> Prompt:
    """One step with a model file."""
    loader = {"class_type": "UNETLoader", "inputs": {"unet_name": FILE, "weight_dtype": "default"}}
    if way == WAYS[2]:
        loader = {"class_type": "AnotherLoader", "inputs": {"name": FILE}}
    sampling = {
        "seed": 1, "steps": 1, "cfg": 1.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0,
        "model": ["1" if way == WAYS[0] else "2", 0], "positive": ["3", 0], "negative": ["3", 0],
        "latent_image": ["4", 0],
    }  # fmt: skip
    size = {"width": 64, "height": 64, "length": 1, "batch_size": 1}
    prompt: Prompt = {
        "1": loader,
        "2": {"class_type": "ParallelModel", "inputs": {"model": ["1", 0], "devices": "0,1", "attention": "auto"}},
        "3": {"class_type": "AnyConditioning", "inputs": {}},
        "4": {"class_type": "EmptyHunyuanLatentVideo", "inputs": size},
        "5": {"class_type": "KSampler", "inputs": sampling},
        "6": {"class_type": "SaveLatent", "inputs": {"samples": ["5", 0], "filename_prefix": "measured"}},
    }
    return prompt


def growth(comfyui: Path, file: Path, way: str) -> int:
    """The growth of ComfyUI's process at its peak, in bytes."""
    server = ComfyServer(comfyui)
    models, extensions = server.base / "models" / "diffusion_models", server.base / "custom_nodes"
    for folder in (models, extensions):
        folder.mkdir(parents=True, exist_ok=True)
    (models / FILE).symlink_to(file)
    (extensions / "measure.py").write_text(NODES, encoding="utf-8")
    with server:
        server.client.object_info()
        before = processes.proportional_memory(server.pid)
        with sampled(partial(processes.proportional_memory, server.pid)) as samples:
            server.client.run(workflow(way), deadline=900.0)
        return max(number for _, number in samples) - before


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--gigabytes", type=float, default=4.0, help="size of the file (default %(default)g)")


def run(options: argparse.Namespace) -> int:
    """Measure with every ComfyUI that is found; return the exit status."""
    for comfyui in comfy_paths.candidates():
        file = comfyui.parent / f".parallel-dit-{FILE}"
        write_wan(file, heads=HEADS, layers=max(2, round(options.gigabytes * 1e9 / BYTES_OF_LAYER)))
        try:
            for way in WAYS:
                grown, size = growth(comfyui, file, way), file.stat().st_size
                print(f"{comfyui.name}, {way}: {grown / 1e6:.0f} MB, {grown / size:.2f} of the file", flush=True)
        finally:
            file.unlink()
    return 0
