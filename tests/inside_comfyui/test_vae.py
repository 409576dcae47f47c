"""Our VAE through ComfyUI's own nodes, and ParallelVAEDecode."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.sd
import pytest
import torch
from any_folder_name.nodes.vae import ParallelVAEDecode
from any_folder_name.parallel_backend.errors import InvalidRequest
from inside_fixtures import Loaded, empty_latent, ksampler, loader_node

import nodes as core_nodes


@pytest.fixture
def latent() -> dict[str, Any]:
    return {"samples": torch.randn(2, 16, 2, 4, 3, generator=torch.Generator().manual_seed(0))}


def test_every_way_to_decode(loaded: Loaded, latent: dict[str, Any]) -> None:
    reference = loaded.client.vae.decode(latent["samples"]).sample.detach()
    expected = ((reference + 1) / 2).clamp(0, 1).movedim(1, -1).flatten(0, 1)
    assert isinstance(loaded.vae, comfy.sd.VAE)
    ways = (
        core_nodes.VAEDecode().decode(loaded.vae, latent)[0],
        core_nodes.VAEDecodeTiled().decode(loaded.vae, latent, 512, 64)[0],
        ParallelVAEDecode.execute(latent, loaded.vae).args[0],
    )
    for pixels in ways:
        assert pixels.shape == (2 * 5, 32, 24, 3)
        assert torch.equal(pixels, expected)


def test_every_way_to_encode(loaded: Loaded) -> None:
    frames = torch.rand(6, 35, 24, 4, generator=torch.Generator().manual_seed(0))
    (plain,) = core_nodes.VAEEncode().encode(loaded.vae, frames)
    (tiled,) = core_nodes.VAEEncodeTiled().encode(loaded.vae, frames, 512, 64)
    cropped = frames[None, :, 1:33, :, :3].movedim(-1, 1) * 2 - 1
    expected = loaded.client.vae.encode(cropped).latent_dist.mode()
    assert plain["samples"].shape == (1, 16, 2, 4, 3)
    assert torch.equal(plain["samples"], expected)
    assert torch.equal(tiled["samples"], expected)
    assert torch.equal(loaded.vae.encode(frames[None]), expected)


def test_ratios_are_those_of_comfyuis_wan_vae(loaded: Loaded) -> None:
    vae = loaded.vae
    assert [vae.upscale_ratio[0](frames) for frames in (0, 1, 3)] == [0, 1, 9]
    assert [vae.downscale_ratio[0](frames) for frames in (1, 5, 9)] == [1, 2, 3]
    assert (vae.spacial_compression_decode(), vae.spacial_compression_encode()) == (8, 8)
    assert vae.temporal_compression_decode() == 4


def test_unusable_latents_and_foreign_vaes_are_refused(loaded: Loaded, latent: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"has 4 channels .* on 16"):
        loaded.vae.decode(torch.zeros(1, 4, 1, 4, 4))
    with pytest.raises(InvalidRequest, match="NaN"):
        loaded.vae.decode(latent["samples"] * torch.nan)
    with pytest.raises(InvalidRequest, match="VAE of ParallelLoader"):
        ParallelVAEDecode.execute(latent, object())
    with pytest.raises(InvalidRequest, match="cannot be saved"):
        loaded.vae.get_sd()
    with pytest.raises(InvalidRequest, match="per_channel_statistics"):
        _ = loaded.vae.first_stage_model.per_channel_statistics


PARTS = {
    "none": ({}, "has no VAE; load one with ComfyUI's Load VAE", "has no text encoder; load one"),
    "other": (
        {"vae": ["diffusers", "AutoencoderDC"], "text_encoder": ["transformers", "CLIPTextModel"]},
        "vae AutoencoderDC is not supported, only AutoencoderKLWan; load one with ComfyUI's Load VAE",
        "text_encoder CLIPTextModel is not supported, only UMT5EncoderModel; load one",
    ),
}
"""By a folder's name: what its index has beside the transformer, and what the uses of VAE and CLIP say."""


@pytest.fixture(params=PARTS)
def part(request: pytest.FixtureRequest, models: Path) -> str:
    """A checkpoint of which the transformer alone can be used."""
    folder = models / request.param
    shutil.copytree(models / "tiny" / "transformer", folder / "transformer", dirs_exist_ok=True)
    for component in PARTS[request.param][0]:
        (folder / component).mkdir(exist_ok=True)
        (folder / component / "config.json").write_text("{}")
    index = {"_class_name": "WanPipeline", "transformer": ["diffusers", "WanTransformer3DModel"]}
    (folder / "model_index.json").write_text(json.dumps(index | PARTS[request.param][0]))
    return str(request.param)


def test_a_model_whose_vae_and_text_encoder_cannot_be_used_samples(
    part: str, load: Callable[..., Loaded], latent: dict[str, Any]
) -> None:
    _, vae, text = PARTS[part]
    loaded = load(name=part)
    assert torch.equal(ksampler(loaded.model, empty_latent()), ksampler(load().model, empty_latent()))
    for use in (lambda: loaded.vae.decode(latent["samples"]), lambda: loaded.vae.encode(torch.zeros(1, 8, 8, 3))):
        with pytest.raises(InvalidRequest, match=f"{part}:? {vae}"):
            use()
    with pytest.raises(InvalidRequest, match=f"{part}:? {text}"):
        loaded.clip.tokenize("a red circle")


def test_what_cannot_be_used_and_is_used_is_refused_by_the_loader(part: str, load: Callable[..., Loaded]) -> None:
    node = loader_node()
    node.hidden.prompt = {
        "7": {"class_type": "ParallelLoader", "inputs": {}},
        "8": {"class_type": "VAEDecode", "inputs": {"vae": ["7", 2]}},
    }
    assert node.execute(part, "fp32", "0,1").args
    node.hidden.prompt["9"] = {"class_type": "SaveImage", "inputs": {"images": ["8", 0]}}
    with pytest.raises(InvalidRequest, match=PARTS[part][1]):
        node.execute(part, "fp32", "0,1")
