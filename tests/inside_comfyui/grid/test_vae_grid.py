"""Every VAE's file through ComfyUI's own loader, against Parallel VAE behind it, on one, two and three ranks.

*VAELoader* and *VAEDecode* are compared with *VAELoader*, *Parallel VAE*, and *VAEDecode* or *Parallel VAE Decode*; the
same with encoding. Batches have two items, and no side divides by the number of ranks.

ComfyUI creates most modules with their published widths, which take minutes on a CPU. The tests give it modules of the
same classes that are narrower. It then loads the file into them. Run it with ``bash scripts/test.sh --grid``.
"""

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import comfy.ldm.genmo.vae.model
import comfy.ldm.lightricks.vae.causal_video_autoencoder
import comfy.ldm.wan.vae
import comfy.ldm.wan.vae2_2
import comfy.sd
import folder_paths
import pytest
import torch
from any_folder_name.nodes.vae import ParallelVAE, ParallelVAEDecode, ParallelVAEEncode
from helpers.executor import Executor, Given, Prompt
from helpers.native_vaes import FRAMES, NATIVE, native_mochi
from natives import HAS_COGVIDEOX
from safetensors.torch import save_file

pytestmark = pytest.mark.grid
_LTX = (comfy.ldm.lightricks.vae.causal_video_autoencoder, "VideoVAE")
CREATED_AS: dict[str, tuple[Any, str]] = {
    "image": (comfy.sd, "AutoencoderKL"),
    "flux": (comfy.sd, "AutoencodingEngine"),
    "flux2": (comfy.sd, "AutoencoderKL"),
    "hunyuan_video": (comfy.sd, "AutoencoderKL"),
    "wan21": (comfy.ldm.wan.vae, "WanVAE"),
    "wan22": (comfy.ldm.wan.vae2_2, "WanVAE"),
    "ltx": _LTX,
    "ltx_noisy": _LTX,
    "ltx_moved": _LTX,
    "mochi": (comfy.ldm.genmo.vae.model, "VideoVAE"),
}
"""Where ComfyUI finds the class of each VAE. Qwen-Image's file is Wan 2.1's."""
if HAS_COGVIDEOX:
    import comfy.ldm.cogvideo.vae

    CREATED_AS["cogvideox"] = (comfy.ldm.cogvideo.vae, "AutoencoderKLCogVideoX")

LATENTS: dict[str, tuple[int, int]] = {
    "image": (2, 4), "flux": (2, 16), "flux2": (2, 16), "hunyuan_video": (2, 16), "wan21": (2, 16), "wan22": (2, 48),
    "ltx": (2, 128), "ltx_noisy": (1, 128), "ltx_moved": (1, 128), "mochi": (2, 12), "cogvideox": (2, 16),
}  # fmt: skip
"""Batch and channels. Newer LTX-Video adds noise, which ComfyUI draws for the whole batch at once."""
HEIGHT, WIDTH = 7, 5
PIXELS = (69, 96)
"""Height and width of what is encoded. ComfyUI cuts off rows beyond the last whole latent row."""
PICTURES: dict[int | None, int] = {None: 2, 1: 1}
"""How many images or frames are encoded, by the latent's frames."""
RES_BLOCKS = [1, 1, 4, 1, 1]
"""Mochi's, by which ComfyUI recognises it."""


@cache
def native(name: str) -> torch.nn.Module:
    """Return ComfyUI's module with random weights."""
    return native_mochi(RES_BLOCKS) if name == "mochi" else NATIVE[name]()[0]


def given(name: str) -> dict[str, Any]:
    """Return a random latent to decode and random pixels to encode, by the keys of the prompt's ``Given`` nodes."""
    random, frames = torch.Generator().manual_seed(2), FRAMES.get(name, 3)
    shape = (*LATENTS[name], *([] if frames is None else [frames]), HEIGHT, WIDTH)
    pixels = torch.rand(PICTURES.get(frames, 9), *PIXELS, 3, generator=random)
    return {f"{name} latent": {"samples": torch.randn(shape, generator=random)}, f"{name} pixels": pixels}


def prompt(name: str, *, devices: str = "", decode: str = "VAEDecode", encode: str = "VAEEncode") -> Prompt:
    """Return a prompt that decodes a latent and encodes pixels. Without ``devices`` ComfyUI does so alone."""
    vae = ["parallel" if devices else "load", 0]
    return {
        "load": {"class_type": "VAELoader", "inputs": {"vae_name": f"{name}.safetensors"}},
        "parallel": {"class_type": "ParallelVAE", "inputs": {"vae": ["load", 0], "devices": devices}},
        "latent": {"class_type": "Given", "inputs": {"key": f"{name} latent"}},
        "pixels": {"class_type": "Given", "inputs": {"key": f"{name} pixels"}},
        "decode": {"class_type": decode, "inputs": {"samples": ["latent", 0], "vae": vae}},
        "encode": {"class_type": encode, "inputs": {"pixels": ["pixels", 0], "vae": vae}},
        "keep pixels": {"class_type": "Recorder", "inputs": {"value": ["decode", 0]}},
        "keep latent": {"class_type": "Recorder", "inputs": {"value": ["encode", 0]}},
    }


def run(nodes: Prompt) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pixels and latent. ComfyUI's noise has our seed."""
    torch.manual_seed(0)
    kept = Executor(ParallelVAE, ParallelVAEDecode, ParallelVAEEncode).run(nodes)
    pixels, encoded = sorted(kept, key=lambda each: isinstance(each, dict))
    return pixels, encoded["samples"]


@cache
def reference(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what ComfyUI alone decodes and encodes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*CREATED_AS[name], lambda *args, **options: deepcopy(native(name)))
        pixels, encoded = run(prompt(name))
    assert pixels.std() > 0.05
    return pixels, encoded


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ComfyUI's folder of VAEs."""
    folder: Path = tmp_path_factory.mktemp("vae")
    folder_paths.folder_names_and_paths["vae"][0][:] = [str(folder)]
    return folder


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", CREATED_AS)
def test_every_vae(
    name: str, ranks: int, folder: Path, use_ranks: Callable[[int], str], compare: Callable[..., None]
) -> None:
    save_file(
        {key: each.contiguous() for key, each in native(name).state_dict().items()}, folder / f"{name}.safetensors"
    )
    folder_paths.filename_list_cache.clear()
    Given.values = given(name)
    expected, devices = reference(name), use_ranks(ranks)
    for door in ("", "Parallel"):
        found = run(prompt(name, devices=devices, decode=f"{door}VAEDecode", encode=f"{door}VAEEncode"))
        for what, ours, theirs in zip(("decode", "encode"), found, expected, strict=True):
            compare(f"vae {name}", f"{door}VAE, {what}, {ranks} ranks", ours, theirs)
