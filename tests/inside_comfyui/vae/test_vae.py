"""Our VAE in ComfyUI's own nodes and in ours."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.model_management
import comfy.nested_tensor
import comfy.sd
import pytest
import torch
from any_folder_name.nodes.backend import connection, session
from any_folder_name.nodes.vae import ParallelVAEDecode, ParallelVAEEncode
from any_folder_name.parallel_backend import processes
from any_folder_name.parallel_backend.errors import InvalidRequest, OutOfMemory
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from any_folder_name.parallel_backend.protocol.messages import Progress
from helpers.inside_fixtures import Loaded, empty_latent, ksampler, loader_node

import nodes as core_nodes


@pytest.fixture
def latent() -> dict[str, Any]:
    return {"samples": torch.randn(2, 16, 2, 4, 3, generator=torch.Generator().manual_seed(0))}


def test_every_way_to_decode(loaded: Loaded, latent: dict[str, Any]) -> None:
    reference = loaded.client.vae.decode(latent["samples"]).sample.detach()
    expected = ((reference + 1) / 2).clamp(0, 1).movedim(1, -1).flatten(0, 1)
    assert isinstance(loaded.vae, comfy.sd.VAE)
    results = (
        core_nodes.VAEDecode().decode(loaded.vae, latent)[0],
        core_nodes.VAEDecodeTiled().decode(loaded.vae, latent, 512, 64)[0],
        ParallelVAEDecode.execute(latent, loaded.vae).args[0],
    )
    for pixels in results:
        assert pixels.shape == (2 * 5, 32, 24, 3)
        assert torch.equal(pixels, expected)


def test_of_a_video_with_sound_the_video_is_decoded(loaded: Loaded, latent: dict[str, Any]) -> None:
    """As VAEDecode does; a node that hands the VAE both is told what to pass."""
    both = comfy.nested_tensor.NestedTensor((latent["samples"], torch.zeros(2, 8, 5, 16)))
    expected = ParallelVAEDecode.execute(latent, loaded.vae).args[0]
    assert torch.equal(ParallelVAEDecode.execute({"samples": both}, loaded.vae).args[0], expected)
    assert torch.equal(core_nodes.VAEDecode().decode(loaded.vae, {"samples": both})[0], expected)
    with pytest.raises(InvalidRequest, match=r"several tensors \(video with audio\)"):
        loaded.vae.decode(both)


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
    assert torch.equal(ParallelVAEEncode.execute(frames, loaded.vae).args[0]["samples"], expected)


@pytest.mark.parametrize(
    ("node", "inputs", "requests"),
    [
        ("VAEDecode", (torch.zeros(1, 16, 1, 65, 3),), [("Decode", 0), ("Decode", 512)]),
        ("VAEEncode", (torch.zeros(1, 312, 48, 3),), [("Encode", 0), ("Encode", 256)]),
        ("VAEDecodeTiled", (torch.zeros(1, 16, 1, 65, 3), 512, 64), [("Decode", 0), ("Decode", 512)]),
        ("VAEDecodeTiled", (torch.zeros(1, 16, 1, 4, 13), 96, 64), [("Decode", 0), ("Decode", 96)]),
        ("VAEEncodeTiled", (torch.zeros(1, 312, 48, 3), 300, 64), [("Encode", 0), ("Encode", 304)]),
        ("VAEEncodeTiled", (torch.zeros(1, 40, 72, 3), 32, 0), [("Encode", 0), ("Encode", 64)]),
    ],
)
def test_tiles_are_used_only_out_of_memory(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, node: str,
    inputs: tuple[Any, ...], requests: list[tuple[str, int]],
) -> None:  # fmt: skip
    attempt = loaded.client.attempt

    def out_of_memory_without_tiles(message: Any, *args: Any, **kwargs: Any) -> Any:
        answer = attempt(message, *args, **kwargs)
        if not message.tile:
            raise OutOfMemory("rank 1 is out of memory")
        return answer

    monkeypatch.setattr(loaded.client, "attempt", out_of_memory_without_tiles)
    if "Decode" in node:
        getattr(core_nodes, node)().decode(loaded.vae, {"samples": inputs[0]}, *inputs[1:])
    else:
        getattr(core_nodes, node)().encode(loaded.vae, *inputs)
    assert [(type(message).__name__, message.tile) for message, _ in loaded.client.requests] == requests
    assert f"going on in VAE tiles of {requests[-1][1]} pixels, which is approximate, since rank 1" in caplog.text


def test_tiles_shrink_until_the_image_fits_or_none_is_left(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(message: Any, *args: Any, **kwargs: Any) -> Any:
        tiles.append(message.tile)
        raise OutOfMemory("rank 1 is out of memory")

    tiles: list[int] = []
    monkeypatch.setattr(loaded.client, "attempt", out_of_memory)
    with pytest.raises(comfy.model_management.OOM_EXCEPTION, match="rank 1"):
        core_nodes.VAEDecodeTiled().decode(loaded.vae, {"samples": torch.zeros(1, 16, 1, 64, 64)}, 512, 64)
    with pytest.raises(comfy.model_management.OOM_EXCEPTION, match="rank 1"):
        core_nodes.VAEEncodeTiled().encode(loaded.vae, torch.zeros(1, 515, 512, 3), 512, 64)
    assert tiles == 2 * [0, 256, 128, 64]


def test_requested_tiles_are_labelled(loaded: Loaded, latent: dict[str, Any]) -> None:
    prepared = type("Prepared", (ParallelVAEDecode,), {"hidden": SimpleNamespace(unique_id="8", extra_pnginfo={})})
    for tile in (0, 64):  # 64 is larger than the image
        prepared.execute(latent, loaded.vae, tile)
        assert prepared.hidden.extra_pnginfo == {}
    prepared.execute({"samples": torch.zeros(1, 16, 1, 12, 3)}, loaded.vae, 64)
    assert [message.tile for message in loaded.client.of_kind("Decode")] == [0, 64, 64]
    assert prepared.hidden.extra_pnginfo == {"parallel_dit": {"8": {"tile": 64, "approximate": "tiles"}}}


def test_a_note_stays_on_the_node(loaded: Loaded, latent: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(connection.Handle, "show", lambda handle, state: shown.append(state))

    def on_one_rank(message: Any, tensors: Any, *, on_progress: Any, **kwargs: Any) -> Any:
        on_progress(Progress(phase="decoding", value=1, total=1, note="on one rank: why"), {})
        return {"pixels": torch.zeros(1, 1, 8, 8, 3)}

    monkeypatch.setattr(loaded.client, "attempt", on_one_rank)
    loaded.vae.decode(latent["samples"])
    assert shown[-2:] == ["decoding 1/1 (on one rank: why)", "ready; on one rank: why"]


@pytest.mark.grid
def test_pixels_take_their_size_here_and_nothing_in_the_supervisor(load_remote: Callable[..., Loaded]) -> None:
    loaded, decode = load_remote(ParallelLayout(ulysses=2)), core_nodes.VAEDecode().decode
    decode(loaded.vae, {"samples": torch.zeros(1, 16, 1, 8, 8)})
    pids = (os.getpid(), session.current().client.status().pid)
    for pid in pids:
        processes.reset_peak_memory(pid)
    before = [processes.peak_memory(pid) for pid in pids]
    (pixels,) = decode(loaded.vae, {"samples": torch.zeros(1, 16, 9, 64, 64)})
    here, supervisor = (processes.peak_memory(pid) - size for pid, size in zip(pids, before, strict=True))
    assert pixels.nbytes == 33 * 512 * 512 * 3 * 4
    assert here <= 1.2 * pixels.nbytes
    assert supervisor <= 0.01 * pixels.nbytes


def test_ratios_equal_comfyuis_wan_vae(loaded: Loaded) -> None:
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
    with pytest.raises(InvalidRequest, match="VAE of Parallel Loader"):
        ParallelVAEDecode.execute(latent, object())
    with pytest.raises(InvalidRequest, match="cannot be saved"):
        loaded.vae.get_sd()
    with pytest.raises(InvalidRequest, match="per_channel_statistics"):
        _ = loaded.vae.first_stage_model.per_channel_statistics


UNUSABLE = {
    "none": ({}, "has no VAE; load one with ComfyUI's Load VAE", "has no text encoder; load one"),
    "other": (
        {"vae": ["diffusers", "AutoencoderDC"], "text_encoder": ["transformers", "CLIPTextModel"]},
        "vae AutoencoderDC is not supported, only AutoencoderKLWan; load one with ComfyUI's Load VAE",
        "text_encoder CLIPTextModel is not supported, only UMT5EncoderModel; load one",
    ),
}
"""By folder: its index besides the transformer, and the messages when the VAE and the CLIP are used."""


@pytest.fixture(params=UNUSABLE)
def transformer_only(request: pytest.FixtureRequest, models: Path) -> str:
    """The name of a checkpoint of which only the transformer can be used."""
    folder = models / request.param
    shutil.copytree(models / "tiny" / "transformer", folder / "transformer", dirs_exist_ok=True)
    for component in UNUSABLE[request.param][0]:
        (folder / component).mkdir(exist_ok=True)
        (folder / component / "config.json").write_text("{}")
    index = {"_class_name": "WanPipeline", "transformer": ["diffusers", "WanTransformer3DModel"]}
    (folder / "model_index.json").write_text(json.dumps(index | UNUSABLE[request.param][0]))
    return str(request.param)


def test_a_model_without_usable_vae_and_text_encoder_samples(
    transformer_only: str, load: Callable[..., Loaded], latent: dict[str, Any]
) -> None:
    _, vae, text = UNUSABLE[transformer_only]
    loaded = load(name=transformer_only)
    assert torch.equal(ksampler(loaded.model, empty_latent()), ksampler(load().model, empty_latent()))
    for use in (lambda: loaded.vae.decode(latent["samples"]), lambda: loaded.vae.encode(torch.zeros(1, 8, 8, 3))):
        with pytest.raises(InvalidRequest, match=f"{transformer_only}:? {vae}"):
            use()
    with pytest.raises(InvalidRequest, match=f"{transformer_only}:? {text}"):
        loaded.clip.tokenize("a red circle")


def test_the_loader_refuses_prompts_that_use_an_unusable_part(
    transformer_only: str, load: Callable[..., Loaded]
) -> None:
    node = loader_node()
    node.hidden.prompt = {
        "7": {"class_type": "ParallelLoader", "inputs": {}},
        "8": {"class_type": "VAEDecode", "inputs": {"vae": ["7", 2]}},
    }
    assert node.execute(transformer_only, "fp32", "0,1").args
    node.hidden.prompt["9"] = {"class_type": "SaveImage", "inputs": {"images": ["8", 0]}}
    with pytest.raises(InvalidRequest, match=UNUSABLE[transformer_only][1]):
        node.execute(transformer_only, "fp32", "0,1")
