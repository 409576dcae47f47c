"""Every VAE class: our VAE against ComfyUI's own modules with the same weights, in ComfyUI's own nodes."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import comfy.cli_args
import comfy.latent_formats
import comfy.ldm.wan.vae
import comfy.model_management
import comfy.sd
import comfy.utils
import pytest
import torch
from any_folder_name.nodes.backend import session
from any_folder_name.nodes.backend.connection import Handle
from any_folder_name.nodes.bridges.latents import fit_scaling, latent_scale
from any_folder_name.nodes.families.registry import bridge_class
from any_folder_name.nodes.remote.vae import RemoteVAE
from any_folder_name.nodes.vae import ParallelVAEDecode
from any_folder_name.parallel_backend.checkpoint.checkpoint import Checkpoint
from any_folder_name.parallel_backend.checkpoint.opening import open_checkpoint
from any_folder_name.parallel_backend.engine import autoencoding
from any_folder_name.parallel_backend.errors import InvalidRequest
from any_folder_name.parallel_backend.families.registry import FAMILIES
from any_folder_name.parallel_backend.protocol.model_spec import Devices, ModelSpec
from any_folder_name.parallel_backend.protocol.tensors import DTYPES, NAMES
from any_folder_name.parallel_backend.vaes import LatentScale, vae_of
from helpers.engine_client import EngineClient
from helpers.inside_fixtures import Loaded, relative_error
from helpers.native_vaes import FRAMES, NATIVE, native_decode, native_encode

import nodes as core_nodes

VIDEO, IMAGE = LatentScale(channels=16, spatial=8, temporal=4), LatentScale(channels=16, spatial=8, video=False)


def write(folder: Path, class_name: str, config: dict[str, Any]) -> Checkpoint:
    """Write a checkpoint with only the class names and the VAE's config."""
    (folder / "vae").mkdir(parents=True, exist_ok=True)
    of_core = [name for name, row in FAMILIES.items() if row.in_core]
    family = next(name for name in of_core if class_name in bridge_class(name).vaes)
    index = {"transformer": ["diffusers", family], "vae": ["diffusers", class_name]}
    (folder / "model_index.json").write_text(json.dumps(index))
    (folder / "vae" / "config.json").write_text(json.dumps(config))
    return open_checkpoint(folder)


Open = Callable[..., tuple[Any, RemoteVAE]]


@pytest.fixture
def opened(loaded: Loaded, tmp_path: Path) -> Open:
    """``opened(name)`` returns ComfyUI's module and our VAE."""
    session.current().client = EngineClient()

    def create(name: str, scale: LatentScale | None = None, *, half: bool = False) -> tuple[Any, RemoteVAE]:
        native, theirs = NATIVE[name]()
        checkpoint = write(tmp_path / name, type(theirs).__name__, {})
        theirs.save_pretrained(tmp_path / name / "vae")
        spec = ModelSpec(path=str(checkpoint.path), devices=Devices(kind="cpu", indices=(0,)))
        vae = vae_of(checkpoint)
        dtype = NAMES[vae.working_dtypes[0]] if half else "auto"
        return native, RemoteVAE(Handle(spec=spec, checkpoint=checkpoint), scale or vae.scale, loaded.model, dtype)

    return create


@pytest.mark.parametrize("name", NATIVE)
def test_decode_equals_comfyui(opened: Open, name: str) -> None:
    native, vae = opened(name)
    frames = FRAMES.get(name, 3)
    latent = torch.randn(1, vae.latent_channels, *([] if frames is None else [frames]), 3, 5)
    expected = native_decode(native, latent)
    assert expected.std() > 0.05
    pixels = vae.decode(latent)
    assert pixels.shape == expected.shape
    assert relative_error(pixels, expected) < 1e-4
    expected = expected if frames is None else expected.flatten(0, 1)
    for result in (
        core_nodes.VAEDecode().decode(vae, {"samples": latent})[0],
        core_nodes.VAEDecodeTiled().decode(vae, {"samples": latent}, 512, 64)[0],
        ParallelVAEDecode.execute({"samples": latent}, vae).args[0],
    ):
        assert result.shape == expected.shape
        assert relative_error(result, expected) < 1e-4


@pytest.mark.parametrize("name", NATIVE)
def test_encode_equals_comfyui(opened: Open, name: str) -> None:
    native, vae = opened(name)
    groups = FRAMES.get(name, 3)
    spatial = vae.spacial_compression_encode()
    frames = 2 if groups is None else vae.upscale_ratio[0](groups)
    pixels = torch.rand(frames, 3 * spatial + 3, 5 * spatial, 4)
    cropped = pixels[:, 1 : 3 * spatial + 1, :, :3]
    expected = native_encode(native, cropped if groups is None else cropped[None])
    for result in (
        core_nodes.VAEEncode().encode(vae, pixels)[0]["samples"],
        core_nodes.VAEEncodeTiled().encode(vae, pixels, 512, 64)[0]["samples"],
    ):
        assert result.shape == expected.shape
        assert relative_error(result, expected) < 1e-4


@pytest.mark.newest
@pytest.mark.parametrize("encode", [False, True], ids=["decode", "encode"])
@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.daily(7)
def test_half_precision_is_as_near_to_float32_as_comfyuis(opened: Open, name: str, encode: bool) -> None:
    native, vae = opened(name, half=True)
    frames, spatial, dtype = FRAMES.get(name, 3), vae.spacial_compression_encode(), DTYPES[vae._dtype]
    if encode:
        size = (1 if frames is None else vae.upscale_ratio[0](frames), 3 * spatial, 5 * spatial, 3)
        given = torch.rand(size) if frames is None else torch.rand(1, *size)
        ours, theirs = vae.encode, native_encode
    else:
        given = torch.randn(1, vae.latent_channels, *([] if frames is None else [frames]), 3, 5)
        ours, theirs = vae.decode, native_decode
    exact = theirs(native, given)
    own = relative_error(theirs(native.to(dtype), given), exact)
    assert own / 4 < relative_error(ours(given), exact) < 2 * own


def test_images_have_the_dtype_in_which_comfyui_keeps_them(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    _, vae = opened("image")
    own = comfy.sd.VAE(sd={"pixel_space_vae": torch.tensor(1.0)})
    assert vae.decode(torch.zeros(1, 4, 3, 3)).dtype == own.decode(torch.zeros(1, 3, 8, 8)).dtype == torch.float32
    monkeypatch.setattr(comfy.cli_args.args, "fp16_intermediates", True, raising=False)
    assert vae.decode(torch.zeros(1, 4, 3, 3)).dtype == own.decode(torch.zeros(1, 3, 8, 8)).dtype
    assert vae.encode(torch.zeros(1, 24, 24, 3)).dtype == own.encode(torch.zeros(1, 8, 8, 3)).dtype


@pytest.mark.parametrize("name", ["wan21", "wan22", "mochi"])
def test_frames_beyond_the_last_group_are_cut_as_in_comfyui(opened: Open, name: str) -> None:
    native, vae = opened(name)
    spatial = vae.spacial_compression_encode()
    pixels = torch.rand(vae.upscale_ratio[0](2) + 2, 2 * spatial, 3 * spatial, 3)
    assert relative_error(vae.encode(pixels), native_encode(native, pixels[None])) < 1e-4


def test_images(opened: Open) -> None:
    native, vae = opened("image")
    latent = torch.randn(2, 4, 3, 5)
    expected = native_decode(native, latent)
    assert relative_error(core_nodes.VAEDecode().decode(vae, {"samples": latent})[0], expected) < 1e-4
    # Like ComfyUI's own, it takes the first frame of a video.
    assert relative_error(vae.decode(torch.stack([latent, -latent], dim=2)), expected) < 1e-4
    pixels, mask = torch.rand(2, 24, 40, 3), torch.zeros(2, 24, 40)
    inpaint = core_nodes.VAEEncodeForInpaint().encode(vae, pixels, mask)[0]
    assert relative_error(inpaint["samples"], native_encode(native, pixels)) < 1e-4
    with pytest.raises(InvalidRequest, match="encodes images, which have 4 dims, and these pixels have 5"):
        vae.encode(pixels[None])


def test_a_video_family_with_an_image_vae(opened: Open) -> None:
    native, vae = opened("image", LatentScale(channels=4, spatial=8))
    latent = torch.randn(1, 4, 3, 3, 5)
    frames = native_decode(native, latent[0].movedim(1, 0))
    assert relative_error(core_nodes.VAEDecode().decode(vae, {"samples": latent})[0], frames) < 1e-4
    encoded = core_nodes.VAEEncode().encode(vae, frames)[0]["samples"]
    assert encoded.shape == latent.shape
    assert relative_error(encoded[0].movedim(1, 0), native_encode(native, frames)) < 1e-4


def test_ratios_equal_comfyui(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    native, vae = opened("wan21")
    # ComfyUI creates the module with the published width.
    monkeypatch.setattr(comfy.ldm.wan.vae, "WanVAE", lambda **_: native)
    comfyuis = comfy.sd.VAE(sd=native.state_dict(), dtype=torch.float32)
    same = ("latent_channels", "latent_dim", "output_channels", "upscale_index_formula", "downscale_index_formula")
    assert [getattr(vae, name) for name in same] == [getattr(comfyuis, name) for name in same]
    for ratio in ("upscale_ratio", "downscale_ratio"):
        ours, theirs = getattr(vae, ratio), getattr(comfyuis, ratio)
        assert [ours[0](frames) for frames in range(20)] == [theirs[0](frames) for frames in range(20)]
        assert ours[1:] == theirs[1:]
    comfyuis, (_, vae) = comfy.sd.VAE(sd={}), opened("image")
    same = (*same, "upscale_ratio", "downscale_ratio")
    assert [getattr(vae, name) for name in same] == [getattr(comfyuis, name) for name in same]
    assert vae.temporal_compression_decode() is None


def test_progress_and_interruption(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    _, vae = opened("qwen_image")
    monkeypatch.setattr(autoencoding, "INTERVAL", 0.0)  # small models are done before their ranks ask whether to go on
    updates: list[tuple[int, int]] = []

    def hook(value: int, total: int, preview: Any, node_id: Any = None) -> None:
        updates.append((value, total))
        comfy.model_management.interrupt_current_processing(len(updates) == 2)

    # Newer versions of ComfyUI drop updates that follow each other closely.
    monkeypatch.setattr(comfy.utils, "PROGRESS_THROTTLE_MIN_INTERVAL", 0.0, raising=False)
    monkeypatch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", hook)
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        vae.decode(torch.zeros(1, 16, 4, 2, 2))
    assert updates == [(1, 4), (2, 4)]


def test_the_vae_or_the_family_gives_the_latents_shape(tmp_path: Path) -> None:
    with_vae = vae_of(write(tmp_path / "checkpoint", "AutoencoderKL", {"block_out_channels": [1] * 4}))
    assert latent_scale(with_vae, IMAGE, "checkpoint") == replace(IMAGE, channels=4)
    assert latent_scale(with_vae, VIDEO, "checkpoint") == LatentScale(channels=4, spatial=8)
    with pytest.raises(InvalidRequest, match="the VAE is for video, and the transformer generates images"):
        latent_scale(vae_of(write(tmp_path / "video", "AutoencoderKLWan", {})), IMAGE, "video")
    assert latent_scale(None, VIDEO, "none") == VIDEO


def process(latent_format: Any, checkpoint: Checkpoint, value: float) -> torch.Tensor:
    """Return ``value`` after ``process_in`` of the fitted format, which ``process_out`` inverts."""
    fit_scaling(latent_format, vae_of(checkpoint), "checkpoint")
    latent = torch.full((1, latent_format.latent_channels, *[1] * latent_format.latent_dimensions), value)
    processed: torch.Tensor = latent_format.process_in(latent)
    torch.testing.assert_close(latent_format.process_out(processed), latent)
    assert processed.shape == latent.shape
    return processed


@pytest.mark.parametrize(
    ("kind", "class_name", "config", "expected"),
    [
        ("SD15", "AutoencoderKL", {}, 5 * 0.18215),
        ("SD15", "AutoencoderKL", {"scaling_factor": 0.5, "shift_factor": None}, 2.5),
        ("Flux", "AutoencoderKL", {"scaling_factor": 0.5, "shift_factor": 1.0}, 2.0),
        ("SD3", "AutoencoderKL", {"scaling_factor": 0.5}, 2.5),
        ("Wan21", "AutoencoderKLWan", {"latents_mean": [1.0] * 16, "latents_std": [2.0] * 16}, 2.0),
        ("Wan22", "AutoencoderKLWan", {"z_dim": 48, "latents_mean": [1.0] * 48, "latents_std": [2.0] * 48}, 2.0),
        ("Wan21", "AutoencoderKLQwenImage", {"latents_mean": [3.0] * 16, "latents_std": [2.0] * 16}, 1.0),
        ("HunyuanVideo", "AutoencoderKLHunyuanVideo", {"scaling_factor": 2.0}, 10.0),
        ("Mochi", "AutoencoderKLMochi", {"latents_mean": [1.0] * 12, "latents_std": [2.0] * 12}, 2.0),
        ("LTXV", "AutoencoderKLLTXVideo", {"scaling_factor": 7.0}, 5.0),
        ("Flux2", "AutoencoderKLFlux2", {}, 5.0),
    ],
)
def test_latent_formats_get_the_vaes_scaling(
    tmp_path: Path, kind: str, class_name: str, config: dict[str, Any], expected: float
) -> None:
    processed = process(getattr(comfy.latent_formats, kind)(), write(tmp_path, class_name, config), 5.0)
    torch.testing.assert_close(processed, torch.full_like(processed, expected))


@pytest.mark.parametrize(
    ("kind", "class_name"), [("Wan21", "AutoencoderKLWan"), ("Mochi", "AutoencoderKLMochi"), ("SD15", "AutoencoderKL")]
)
def test_comfyuis_scaling_is_the_default(tmp_path: Path, kind: str, class_name: str) -> None:
    fitted, default = getattr(comfy.latent_formats, kind)(), getattr(comfy.latent_formats, kind)()
    latent = torch.randn(1, default.latent_channels, *[2] * default.latent_dimensions)
    fit_scaling(fitted, vae_of(write(tmp_path, class_name, {})), "checkpoint")
    torch.testing.assert_close(fitted.process_in(latent), default.process_in(latent))


@pytest.mark.parametrize(
    ("kind", "class_name", "config", "message"),
    [
        ("SD15", "AutoencoderKL", {"shift_factor": 0.1}, "shift_factor 0.1, .* SD15 has none"),
        ("HunyuanVideo", "AutoencoderKLWan", {}, "has latents_mean .* HunyuanVideo lacks them"),
        ("Wan21", "AutoencoderKL", {}, "lacks latents_mean .* Wan21 has them"),
        ("Wan22", "AutoencoderKLWan", {}, "latents_mean has 16 values, .* Wan22 has 48 channels"),
    ],
)
def test_scaling_that_a_latent_format_cannot_hold_is_refused(
    tmp_path: Path, kind: str, class_name: str, config: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        fit_scaling(getattr(comfy.latent_formats, kind)(), vae_of(write(tmp_path, class_name, config)), "checkpoint")


def test_a_latent_too_small_for_reflection_padding(opened: Open) -> None:
    _, vae = opened("ltx")
    with pytest.raises(InvalidRequest, match=r"\[1, 4\] is too small .* must be at least 2"):
        vae.decode(torch.zeros(1, 128, 1, 1, 4))
