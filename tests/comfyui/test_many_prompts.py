"""Random prompts one after the other in one ComfyUI, under each of its caches: its queue never stands.

Files, LoRAs, strengths, seeds and loaders change from prompt to prompt. Each latent equals that of ComfyUI's own nodes.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, load_file, save_file
from torch import Tensor

from lab.bench.model_file import TEXT, write_wan
from lab.soak.ledger import NOISE, processes_of
from parallel_backend.engine import kept_tensors
from parallel_backend.processes import resident_memory
from scripts.comfy_api import ComfyClient, File, Prompt
from scripts.comfy_server import ComfyServer
from tests.comfyui.prompts import START

CLOSE, FAR = 1e-4, 1e-2
EVERYDAY, MANY, TEXTS = 16, 200, 500
LONG_TEXT = 400
TEXT_BYTES = 4 * LONG_TEXT * TEXT
CACHES = {
    "default": (),
    "ram": ("--cache-ram", "100000"),  # more than there is, so that it always makes room
    "lru": ("--cache-lru", "4"),
    "none": ("--cache-none",),
    "classic": ("--cache-classic",),
}
FILES, LORAS, STRENGTHS = (
    ("one.safetensors", "two.safetensors"),
    ("", "first.safetensors", "second.safetensors"),
    (0.5, 1),
)
WAYS = ("Parallel Model", "Parallel Model, LoRA before", "Parallel Loader", "Parallel Loader, Parallel Sampler")
RANDOM_TEXT = f"""
import torch

class RandomText:
    WIDGETS = {{"seed": ("INT", {{"default": 0}}), "tokens": ("INT", {{"default": 5}})}}
    INPUT_TYPES = classmethod(lambda cls: {{"required": cls.WIDGETS}})
    RETURN_TYPES, FUNCTION, CATEGORY = ("CONDITIONING",), "make", "tests"

    def make(self, seed, tokens):
        return ([[torch.randn(1, tokens, {TEXT}, generator=torch.Generator().manual_seed(seed)), {{}}]],)

NODE_CLASS_MAPPINGS = {{"RandomText": RandomText}}
"""
"""An extension with a prompt without text encoders."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """What one prompt does. ``way`` is one of ``WAYS``, or ``"ComfyUI"`` for its own nodes alone."""

    file: str
    lora: str
    strength: float
    seed: int
    way: str


def draws(seed: int, count: int) -> Iterator[Draw]:
    choose = random.Random(seed).choice
    for _ in range(count):
        yield Draw(
            file=choose(FILES), lora=choose(LORAS), strength=choose(STRENGTHS), seed=choose(range(6)), way=choose(WAYS)
        )


def graph(draw: Draw) -> Prompt:
    nodes: Prompt = {
        "text": {"class_type": "RandomText", "inputs": {"seed": 1, "tokens": 5}},
        "empty": {"class_type": "RandomText", "inputs": {"seed": 2, "tokens": 5}},
        "latent": {
            "class_type": "EmptyHunyuanLatentVideo",
            "inputs": {"width": 80, "height": 64, "length": 1, "batch_size": 1},
        },
        "file": {"class_type": "UNETLoader", "inputs": {"unet_name": draw.file, "weight_dtype": "default"}},
    }
    if draw.way.startswith("Parallel Loader"):
        inputs = {"model_name": f"diffusion_models/{draw.file}", "dtype": "auto", "devices": "0,1"}
        nodes["file"] = {"class_type": "ParallelLoader", "inputs": inputs}
    parallel: dict[str, Any] = {"class_type": "ParallelModel", "inputs": {"devices": "0,1", "attention": "auto"}}
    lora: dict[str, Any] = {
        "class_type": "LoraLoaderModelOnly",
        "inputs": {"lora_name": draw.lora, "strength_model": draw.strength},
    }
    chain = [lora] if draw.lora else []
    if draw.way.startswith("Parallel Model"):
        chain = [*chain, parallel] if draw.way.endswith("before") else [parallel, *chain]
    model = "file"
    for place, node in enumerate(chain):
        nodes[f"chain {place}"] = {**node, "inputs": {**node["inputs"], "model": [model, 0]}}
        model = f"chain {place}"
    sampler = "ParallelSampler" if draw.way.endswith("Parallel Sampler") else "KSampler"
    sampling = {
        "model": [model, 0], "positive": ["text", 0], "negative": ["empty", 0], "latent_image": ["latent", 0],
        "seed": draw.seed, "steps": 3, "cfg": 4.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0,
    }  # fmt: skip
    nodes["sample"] = {"class_type": sampler, "inputs": sampling}
    nodes["save"] = {"class_type": "SaveLatent", "inputs": {"samples": ["sample", 0], "filename_prefix": "many"}}
    return nodes


def latent(client: ComfyClient, draw: Draw) -> Tensor:
    """Run a prompt. One that never ends is a queue that stands."""
    result = client.run(graph(draw), deadline=START)
    (entry,) = result.outputs["save"]["latents"]
    file = File(filename=entry["filename"], subfolder=entry["subfolder"], type=entry["type"])
    return load(client.fetch(file))["latent_tensor"].float()


def relative(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


def write_files(base: Path) -> None:
    folders = {name: base / name for name in ("models/diffusion_models", "models/loras", "custom_nodes")}
    for folder in folders.values():
        folder.mkdir(parents=True, exist_ok=True)
    for layers, name in enumerate(FILES, 1):
        file, numbers = folders["models/diffusion_models"] / name, torch.Generator().manual_seed(layers)
        write_wan(file, heads=2, layers=layers)
        # Its own numbers are all positive, which makes prompts count for little.
        shapes = {key: tensor.shape for key, tensor in load_file(file).items()}
        save_file({key: torch.randn(shape, generator=numbers) * 0.1 for key, shape in shapes.items()}, file)
    for seed, name in enumerate(LORAS[1:]):
        numbers = torch.Generator().manual_seed(seed)
        layer = "diffusion_model.blocks.0.self_attn.o"
        factors = {f"{layer}.lora_A.weight": (4, 256), f"{layer}.lora_B.weight": (256, 4)}
        tensors = {key: torch.randn(shape, generator=numbers) * 0.3 for key, shape in factors.items()}
        save_file(tensors, folders["models/loras"] / name)
    (folders["custom_nodes"] / "random_text.py").write_text(RANDOM_TEXT, encoding="utf-8")


@pytest.fixture(scope="module")
def references() -> dict[tuple[Path, Draw], Tensor]:
    """What ComfyUI's own nodes gave, under any cache."""
    return {}


def run(
    new_server: Callable[..., ComfyServer], cache: str, count: int, references: dict[tuple[Path, Draw], Tensor]
) -> None:
    server = new_server(arguments=CACHES[cache], prepare=write_files)
    for place, draw in enumerate(draws(len(cache), count)):
        native = replace(draw, way="ComfyUI", strength=draw.strength if draw.lora else 1.0)
        key = server.comfyui, native
        if key not in references:
            references[key] = latent(server.client, native)
        error = relative(latent(server.client, draw), references[key])
        assert error < CLOSE, f"prompt {place} ({draw}) differs by {error:.1e}"
    found = [each for (comfyui, _), each in references.items() if comfyui == server.comfyui]
    assert all(relative(found[0], other) > FAR for other in found[1:])


@pytest.mark.newest
def test_prompts_after_prompts(new_server: Callable[..., ComfyServer], references: Any) -> None:
    run(new_server, "default", EVERYDAY, references)


@pytest.mark.long
@pytest.mark.timeout(7200)  # the cache of the oldest ComfyUI collects garbage for seconds at each node
@pytest.mark.parametrize("cache", CACHES)
def test_two_hundred_prompts(new_server: Callable[..., ComfyServer], cache: str, references: Any) -> None:
    run(new_server, cache, MANY, references)


def memory(server: ComfyServer) -> dict[int, int]:
    """Resident bytes of ComfyUI and of each process of its backend, by process id."""
    return {pid: resident_memory(pid) for pid in (server.pid, *processes_of(server.runtime))}


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_nothing_grows_while_texts_change(new_server: Callable[..., ComfyServer]) -> None:
    full = kept_tensors.MAX_BYTES // TEXT_BYTES + 20  # from here on, each rank drops a text for each new one
    assert (TEXTS - full) * TEXT_BYTES > 10 * NOISE, "too few prompts to show a text that stays"
    # Freed tensors go back to the system at once, so that memory shows what is kept and not the gaps between it.
    server = new_server(prepare=write_files, env={"MALLOC_MMAP_THRESHOLD_": "1000000"})
    before: dict[int, int] = {}
    for place in range(TEXTS):
        draw = Draw(file=FILES[0], lora="", strength=1.0, seed=place, way=WAYS[0 if place % 2 else 3])
        prompt = graph(draw)
        prompt["text"]["inputs"] = {"seed": place, "tokens": LONG_TEXT}
        server.client.run(prompt, deadline=START)
        if place == full:
            before = memory(server)
    after = memory(server)
    assert after.keys() == before.keys(), "the processes are others"
    grown = {pid: after[pid] - before[pid] for pid in before}
    print(f"{TEXTS - full} prompts, each with {TEXT_BYTES / 1e6:.1f} MB of text: {grown}")
    assert max(grown.values()) < NOISE
