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
from inside_fixtures import Loaded

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


def test_a_checkpoint_without_vae_says_so_when_it_is_used(
    models: Path, load: Callable[..., Loaded], latent: dict[str, Any]
) -> None:
    folder = models / "no vae"
    shutil.copytree(models / "tiny" / "transformer", folder / "transformer", dirs_exist_ok=True)
    index = {"_class_name": "WanPipeline", "transformer": ["diffusers", "WanTransformer3DModel"]}
    (folder / "model_index.json").write_text(json.dumps(index))
    loaded = load(name="no vae")
    for use in (lambda: loaded.vae.decode(latent["samples"]), lambda: loaded.vae.encode(torch.zeros(1, 8, 8, 3))):
        with pytest.raises(InvalidRequest, match=r"no vae has no VAE; load one"):
            use()
    with pytest.raises(InvalidRequest, match="no text encoder"):
        loaded.clip.tokenize("a red circle")
