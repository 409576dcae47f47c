"""VAEs in one safetensors file, in ComfyUI's names or diffusers': decoded and encoded as by ComfyUI's own modules."""

import json
from pathlib import Path
from typing import Any

import comfy.latent_formats
import pytest
import torch
from any_folder_name.nodes.bridges.latents import fit_scaling
from any_folder_name.nodes.families.registry import bridge_class
from any_folder_name.parallel_backend.checkpoint.checkpoint import Checkpoint
from any_folder_name.parallel_backend.checkpoint.opening import open_checkpoint
from any_folder_name.parallel_backend.errors import InvalidRequest
from any_folder_name.parallel_backend.loading.load import load_vae
from any_folder_name.parallel_backend.vaes import VAES, vae_of
from helpers.inside_fixtures import relative_error
from helpers.native_vaes import FRAMES, NATIVE, native_decode, native_encode
from safetensors.torch import save_file

CPU = torch.device("cpu")
SCALING = ("scaling_factor", "shift_factor", "latents_mean", "latents_std")
"""Entries of a config that a file does not hold."""
CLASSES = {"qwen_image": "AutoencoderKLWan"}
"""The class that a file is loaded as, if it is not the twin's."""

Weights = dict[str, torch.Tensor]


def save(path: Path, weights: Weights, prefix: str = "", metadata: dict[str, str] | None = None) -> Checkpoint:
    """Write one file and open it."""
    save_file({prefix + name: tensor.contiguous().clone() for name, tensor in weights.items()}, str(path), metadata)
    return open_checkpoint(path)


def check_equal(native: Any, checkpoint: Checkpoint, frames: int | None) -> None:
    """Compare decoding and encoding with ComfyUI's module."""
    vae, module = vae_of(checkpoint), load_vae(checkpoint, CPU)
    latent = torch.randn(1, vae.scale.channels, *([] if frames is None else [frames]), 3, 4)
    expected = native_decode(native, latent)
    assert expected.std() > 0.05
    parts: list[torch.Tensor] = []
    vae.decode(module, latent, parts.append, lambda: None)
    decoded = ((torch.cat(parts, dim=2) + 1) / 2).clamp(0, 1).movedim(1, -1)
    assert relative_error(decoded if frames is not None else decoded[:, 0], expected) < 1e-4
    count = () if frames is None else (vae.encoded_frames(vae.pixel_frames(frames)),)
    pixels = torch.rand(1, *count, 3 * vae.scale.spatial, 4 * vae.scale.spatial, 3)
    encoded = vae.encode(module, pixels.movedim(-1, 1) * 2 - 1, lambda: None)
    assert relative_error(encoded, native_encode(native, pixels)) < 1e-4


def same_weights(checkpoint: Checkpoint, theirs: Any, dtype: torch.dtype = torch.float32) -> None:
    """Assert that the loaded module has the twin's weights in ``dtype``, bit for bit."""
    ours, expected = load_vae(checkpoint, CPU).state_dict(), theirs.state_dict()
    assert ours.keys() == expected.keys()
    for name, tensor in expected.items():
        wanted = tensor.to(dtype).float() if tensor.is_floating_point() else tensor
        assert torch.equal(ours[name], wanted), name


@pytest.mark.parametrize("name", NATIVE)
def test_a_file_in_comfyuis_names(tmp_path: Path, name: str) -> None:
    native, theirs = NATIVE[name]()
    checkpoint = save(tmp_path / "vae.safetensors", native.state_dict())
    assert dict(checkpoint.components) == {"vae": CLASSES.get(name, type(theirs).__name__)}
    same_weights(checkpoint, theirs)
    check_equal(native, checkpoint, FRAMES.get(name, 2))


@pytest.mark.parametrize("name", NATIVE)
def test_the_config_is_the_twins(tmp_path: Path, name: str) -> None:
    native, theirs = NATIVE[name]()
    twin = VAES[type(theirs).__name__](theirs.config)
    for weights in (native.state_dict(), theirs.state_dict()):
        checkpoint = save(tmp_path / "vae.safetensors", weights)
        config = {key: value for key, value in checkpoint.config("vae").items() if key not in SCALING}
        known = {key: theirs.config[key] for key in config if theirs.config.get(key) is not None}
        assert {key: config[key] for key in known} == {
            key: list(value) if isinstance(value, tuple) else value for key, value in known.items()
        }
        vae = vae_of(checkpoint)
        assert (vae.scale, vae.colors, vae.min_latent_size) == (twin.scale, twin.colors, twin.min_latent_size)


@pytest.mark.parametrize("name", NATIVE)
def test_a_file_in_diffusers_names(tmp_path: Path, name: str) -> None:
    _, theirs = NATIVE[name]()
    same_weights(save(tmp_path / "vae.safetensors", theirs.state_dict()), theirs)


@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_file_in_half_precision(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    native, theirs = NATIVE[name]()
    weights = {key: each.to(dtype) if each.is_floating_point() else each for key, each in native.state_dict().items()}
    same_weights(save(tmp_path / "vae.safetensors", weights), theirs, dtype)


@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("prefix", ["vae.", "first_stage_model."])
@pytest.mark.daily(7)
def test_the_vae_of_a_whole_model(tmp_path: Path, native: Any, name: str, prefix: str) -> None:
    vae, theirs = NATIVE[name]()
    others = {
        f"model.diffusion_model.{key}": tensor for key, tensor in native.model.diffusion_model.state_dict().items()
    } | {"text_encoders.umt5xxl.shared.weight": torch.zeros(2, 2)}
    weights = {prefix + key: tensor for key, tensor in vae.state_dict().items()} | others
    checkpoint = save(tmp_path / "model.safetensors", weights)
    assert checkpoint.components["transformer"] == "WanTransformer3DModel"
    same_weights(checkpoint, theirs)
    same_weights(save(tmp_path / "vae.safetensors", vae.state_dict(), prefix), theirs)


def test_ltx_follows_its_metadata(tmp_path: Path) -> None:
    native, theirs = NATIVE["ltx_moved"]()
    for layer in native.modules():
        if isinstance(layer, torch.nn.Conv3d):
            layer.padding_mode = "replicate"
    vae = {
        "dims": 3, "norm_layer": "pixel_norm", "latent_log_var": "uniform", "spatial_padding_mode": "replicate",
        "decoder_blocks": native.decoder.blocks_desc,
    }  # fmt: skip
    if hasattr(native, "decode_noise_scale"):  # older versions of ComfyUI do not read these
        native.decode_noise_scale, native.decode_timestep = 0.1, 0.2
        vae |= {"decode_noise_scale": 0.1, "decode_timestep": 0.2}
    metadata = {"config": json.dumps({"vae": vae})}
    checkpoint = save(tmp_path / "vae.safetensors", native.state_dict(), metadata=metadata)
    same_weights(checkpoint, theirs)
    check_equal(native, checkpoint, 2)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("SD15", "image"), ("SDXL", "image"), ("SD3", "flux"), ("Flux", "flux"), ("Flux2", "flux2"), ("Wan21", "wan21"),
        ("Wan22", "wan22"), ("Wan21", "qwen_image"), ("HunyuanVideo", "hunyuan_video"), ("LTXV", "ltx"),
        ("Mochi", "mochi"),
    ],
)  # fmt: skip
def test_comfyuis_scaling_stays(tmp_path: Path, kind: str, name: str) -> None:
    native, _ = NATIVE[name]()
    checkpoint = save(tmp_path / "vae.safetensors", native.state_dict())
    fitted, default = getattr(comfy.latent_formats, kind)(), getattr(comfy.latent_formats, kind)()
    fit_scaling(fitted, vae_of(checkpoint), "vae")
    latent = torch.randn(1, default.latent_channels, *[2] * default.latent_dimensions)
    assert torch.equal(fitted.process_in(latent), default.process_in(latent))
    assert torch.equal(fitted.process_out(latent), default.process_out(latent))


def test_qwen_image_takes_the_class_that_its_file_is_loaded_as() -> None:
    assert {"AutoencoderKLWan", "AutoencoderKLQwenImage"} <= set(bridge_class("QwenImageTransformer2DModel").vaes)


def test_a_transformer_is_no_vae(tmp_path: Path, native: Any) -> None:
    checkpoint = save(tmp_path / "wan.safetensors", native.model.diffusion_model.state_dict())
    with pytest.raises(InvalidRequest, match=r"wan.safetensors has no vae \(it has transformer\)"):
        checkpoint.config("vae")
