"""ComfyUI alone against our nodes on a real backend of two ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from any_folder_name.nodes.vae import ParallelVAEDecode
from any_folder_name.parallel_backend.layout.modes import LayoutMode
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from helpers.inside_fixtures import Loaded, conditioning, empty_latent, ksampler, parallel_sampler, relative_error

import nodes as core_nodes

LAYOUTS = [None, ParallelLayout(), ParallelLayout(cfg=2), ParallelLayout(ulysses=2), ParallelLayout(data=2)]
CLOSE = 1e-4


def inpainting_masks() -> torch.Tensor:
    """Return one mask per sample, different in the last frame, whose edges are soft at the latent's size."""
    masks = torch.zeros(2, 1, 3, 48, 40)
    masks[0, ..., :20] = 1.0
    masks[1, ..., :28, :] = 1.0
    masks[:, :, 2] = 0.3
    return masks


PARTIAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mask": ({"noise_mask": inpainting_masks()}, {}),
    "one mask for all": ({"noise_mask": inpainting_masks()[0, 0]}, {}),
    "batch_index": ({"batch_index": [4, 1]}, {}),
    "denoise": ({}, {"denoise": 0.5}),
    "all": ({"noise_mask": inpainting_masks(), "batch_index": [4, 1]}, {"denoise": 0.5, "sampler_name": "heun"}),
}
"""The latent's entries besides its samples, and KSampler's inputs."""


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("sample", [ksampler, parallel_sampler])
def test_sampling(
    native: Any, load_remote: Callable[..., Loaded], layout: ParallelLayout | None, sample: Callable[..., Any]
) -> None:
    options = {"positive": conditioning(1, length=20)}
    reference = ksampler(native, empty_latent(batch=2, frames=3), **options)
    ours = sample(load_remote(layout).model, empty_latent(batch=2, frames=3), **options)
    assert relative_error(ours, reference) < CLOSE


def test_sampling_in_a_mode_that_measures(native: Any, load_remote: Callable[..., Loaded]) -> None:
    """Its steps may run in several layouts. Which ones depends on the machine."""
    model = load_remote(LayoutMode(name="fastest")).model
    for seed in (1, 2):
        options = {"steps": 11, "seed": seed, "positive": conditioning(1, length=20)}
        reference = ksampler(native, empty_latent(batch=2, frames=3), **options)
        assert relative_error(ksampler(model, empty_latent(batch=2, frames=3), **options), reference) < CLOSE


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize(("extra", "options"), PARTIAL.values(), ids=PARTIAL.keys())
def test_sampling_from_an_image(
    native: Any,
    load_remote: Callable[..., Loaded],
    layout: ParallelLayout | None,
    extra: dict[str, Any],
    options: dict[str, Any],
) -> None:
    latent = {"samples": torch.randn(2, 16, 3, 6, 5, generator=torch.Generator().manual_seed(3))}
    reference = ksampler(native, latent | extra, **options)
    assert relative_error(parallel_sampler(load_remote(layout).model, latent | extra, **options), reference) < CLOSE
    assert relative_error(ksampler(native, latent), reference) > 0.1  # the options have an effect


def test_prompt_to_pixels(load_remote: Callable[..., Loaded], models: Path) -> None:
    loaded = load_remote()
    positive, negative = (
        core_nodes.CLIPTextEncode().encode(loaded.clip, text)[0] for text in ("a (red:1.3) circle", "")
    )
    text_encoder = loaded.client.text_encoder
    ids = torch.tensor([[pair[0] for pair in loaded.clip.tokenize("")["umt5xxl"][0]]])
    mask = (torch.arange(ids.shape[1]) < 1).long()[None]
    reference = text_encoder(ids, attention_mask=mask).last_hidden_state.detach() * mask[..., None]
    assert relative_error(negative[0][0], reference) < 1e-5
    latent = {"samples": parallel_sampler(loaded.model, empty_latent(), positive=positive, negative=negative)}
    pixels = ParallelVAEDecode.execute(latent, loaded.vae).args[0]
    expected = (loaded.client.vae.decode(latent["samples"]).sample.detach().movedim(1, -1) + 1) / 2
    assert relative_error(pixels, expected.clamp(0, 1).flatten(0, 1)) < 1e-5
    (encoded,) = core_nodes.VAEEncode().encode(loaded.vae, pixels)
    assert encoded["samples"].shape == (1, 16, 1, 6, 5)


def test_native_nodes_with_a_video_vae(load_remote: Callable[..., Loaded]) -> None:
    loaded = load_remote(ParallelLayout(ulysses=2))
    vae, latent = loaded.client.vae, torch.randn(2, 16, 2, 4, 3, generator=torch.Generator().manual_seed(0))
    expected = ((vae.decode(latent).sample.detach() + 1) / 2).clamp(0, 1).movedim(1, -1).flatten(0, 1)
    for pixels in (
        core_nodes.VAEDecode().decode(loaded.vae, {"samples": latent})[0],
        core_nodes.VAEDecodeTiled().decode(loaded.vae, {"samples": latent}, 512, 64)[0],
    ):
        assert pixels.shape == (2 * 5, 32, 24, 3)
        assert relative_error(pixels, expected) < 1e-5
    frames = expected[:5]
    encoded = vae.encode(frames[None].movedim(-1, 1) * 2 - 1).latent_dist.mode().detach()
    for node in (core_nodes.VAEEncode().encode, lambda *args: core_nodes.VAEEncodeTiled().encode(*args, 512, 64)):
        assert relative_error(node(loaded.vae, frames)[0]["samples"], encoded) < 1e-5
