"""From a prompt or a class to images in the families that ComfyUI lacks, on two ranks and through native nodes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from any_folder_name.nodes.class_label import ParallelClassLabel
from any_folder_name.nodes.vae import ParallelVAEDecode
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from diffusers import AutoencoderKL, AutoencoderKLCogVideoX
from einops import rearrange
from helpers import tiny_wan
from helpers.custom_cases import CASES, encoder
from helpers.inside_fixtures import Loaded, ksampler, parallel_sampler, relative_error

import nodes as core_nodes

pytestmark = pytest.mark.newest  # custom model classes, the same in every ComfyUI
CLOSE = 1e-4
WIDTHS = (8, 8, 8, 8)
FRAMES = {"cogvideox 2b": 9, "cogvideox 5b": 9, "latte": 3, "dit": 1}


def tiny_vae(name: str) -> Any:
    """Return a VAE with the family's ratios and scaling factor, and random weights."""
    torch.manual_seed(0)
    options = {"block_out_channels": WIDTHS, "norm_num_groups": 2, "layers_per_block": 1}
    factor = CASES[name].vae["scaling_factor"]
    if name.startswith("cogvideox"):
        return AutoencoderKLCogVideoX(**options, scaling_factor=factor).eval()
    downs, ups = ["DownEncoderBlock2D"] * len(WIDTHS), ["UpDecoderBlock2D"] * len(WIDTHS)
    return AutoencoderKL(
        **options, down_block_types=downs, up_block_types=ups, latent_channels=4, scaling_factor=factor
    ).eval()


@pytest.fixture
def load_whole(models: Path, load_remote: Callable[..., Loaded]) -> Callable[[str, ParallelLayout], Loaded]:
    """``load_whole(name, layout)`` loads a case's checkpoint with a VAE, a text encoder and a tokenizer."""

    def load(name: str, layout: ParallelLayout) -> Loaded:
        folder = models / f"{name} whole"
        if not folder.exists():
            CASES[name].write(folder)
            tiny_vae(name).save_pretrained(folder / "vae")
            index = json.loads((folder / "model_index.json").read_text())
            if name != "dit":
                encoder().save_pretrained(folder / "text_encoder")
                (folder / "tokenizer").mkdir()
                tiny_wan.tokenizer().save(str(folder / "tokenizer" / "tokenizer.json"))
                index["text_encoder"] = ["transformers", "T5EncoderModel"]
            (folder / "model_index.json").write_text(json.dumps(index))
        return load_remote(layout, name=folder.name)

    return load


def prompts(loaded: Loaded, name: str) -> dict[str, Any]:
    if name == "dit":
        positive, negative = ParallelClassLabel.execute(label=3).args
    else:
        positive, negative = (core_nodes.CLIPTextEncode().encode(loaded.clip, text)[0] for text in ("a red circle", ""))
    return {"positive": positive, "negative": negative}


@torch.no_grad()
def decoded(name: str, latent: torch.Tensor) -> torch.Tensor:
    """Return one latent as decoded by diffusers' VAE, in the form of IMAGE."""
    vae = tiny_vae(name)
    if name == "latte":
        latent = rearrange(latent, "1 c t h w -> t c h w")
    pixels = (vae.decode(latent).sample / 2 + 0.5).clamp(0, 1)
    return rearrange(pixels, "b c t h w -> (b t) h w c" if pixels.ndim == 5 else "b c h w -> b h w c")


@pytest.mark.parametrize("name", FRAMES)
def test_prompt_to_images(name: str, load_whole: Callable[..., Loaded]) -> None:
    shape = (1, *CASES[name].latent[1:])
    latents = {}
    for sample, layout in ((ksampler, ParallelLayout(ulysses=2)), (parallel_sampler, ParallelLayout(cfg=2))):
        loaded = load_whole(name, layout)
        latents[sample] = sample(loaded.model, {"samples": torch.zeros(shape)}, **prompts(loaded, name))
        for pixels in (
            core_nodes.VAEDecode().decode(loaded.vae, {"samples": latents[sample]})[0],
            ParallelVAEDecode.execute({"samples": latents[sample]}, loaded.vae).args[0],
        ):
            assert pixels.shape == (FRAMES[name], 8 * shape[-2], 8 * shape[-1], 3)
            assert (pixels - decoded(name, latents[sample])).abs().max() < CLOSE
            assert pixels.std() > 0.001
    assert relative_error(latents[parallel_sampler], latents[ksampler]) < CLOSE


@torch.no_grad()
def test_native_nodes_with_an_image_vae(load_whole: Callable[..., Loaded]) -> None:
    loaded, latent = load_whole("dit", ParallelLayout(ulysses=2)), torch.randn(2, 4, 7, 5)
    for pixels in (
        core_nodes.VAEDecode().decode(loaded.vae, {"samples": latent})[0],
        core_nodes.VAEDecodeTiled().decode(loaded.vae, {"samples": latent}, 512, 64)[0],
    ):
        assert pixels.shape == (2, 56, 40, 3)
        assert (pixels - decoded("dit", latent)).abs().max() < CLOSE
    image, mask = torch.rand(2, 59, 40, 3), torch.zeros(2, 59, 40)
    mask[:, :30] = 1.0
    blanked = torch.where(mask[..., None] > 0, torch.full_like(image, 0.5), image)
    latents = [
        tiny_vae("dit").encode(rearrange(pixels[:, 1:57], "b h w c -> b c h w") * 2 - 1).latent_dist.mode()
        for pixels in (image, blanked)
    ]
    inpaint = core_nodes.VAEEncodeForInpaint().encode(loaded.vae, image, mask)[0]
    assert inpaint["noise_mask"].shape == (2, 1, 56, 40)
    assert relative_error(inpaint["samples"], latents[1]) < CLOSE
    assert relative_error(latents[0], latents[1]) > 0.1
    for encoded in (
        core_nodes.VAEEncode().encode(loaded.vae, image)[0],
        core_nodes.VAEEncodeTiled().encode(loaded.vae, image, 512, 64)[0],
    ):
        assert relative_error(encoded["samples"], latents[0]) < CLOSE
