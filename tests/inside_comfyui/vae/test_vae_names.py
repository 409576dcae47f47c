"""Published VAEs, as ComfyUI creates them: their names and shapes without weights."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import comfy.ldm.genmo.vae.model
import comfy.ldm.lightricks.vae.causal_video_autoencoder as lightricks
import comfy.ldm.models.autoencoder
import comfy.ldm.wan.vae
import comfy.ldm.wan.vae2_2
import pytest
import torch
from any_folder_name.parallel_backend.checkpoint.architectures import VAES, architecture_of, recognise
from any_folder_name.parallel_backend.errors import InvalidRequest
from any_folder_name.parallel_backend.loading.partial import empty
from any_folder_name.parallel_backend.loading.row_map import Shape, converted
from any_folder_name.parallel_backend.vaes import module_class_of
from diffusers.loaders import single_file_utils
from helpers import dynamic_vram
from natives import HAS_COGVIDEOX

KL = {
    "double_z": True, "resolution": 256, "in_channels": 3, "out_ch": 3, "ch": 128, "ch_mult": [1, 2, 4, 4],
    "num_res_blocks": 2, "attn_resolutions": [], "dropout": 0.0,
}  # fmt: skip
"""What ComfyUI assumes for every AutoencoderKL."""

WAN = {"dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "temperal_downsample": [False, True, True]}


def _kl(channels: int, **options: Any) -> Any:
    shape = KL | {"z_channels": channels} | options
    return comfy.ldm.models.autoencoder.AutoencoderKL(ddconfig=shape, embed_dim=channels)


def _cogvideox() -> Any:
    from comfy.ldm.cogvideo.vae import AutoencoderKLCogVideoX

    return AutoencoderKLCogVideoX()


def _minimax_h3() -> Any:
    from comfy.ldm.minimax.vae import MiniMaxH3VideoVAE

    return MiniMaxH3VideoVAE()


PUBLISHED: dict[str, tuple[str, Callable[[], Any]]] = {
    "sd": ("AutoencoderKL", lambda: _kl(4)),
    "flux2": ("AutoencoderKLFlux2", lambda: _kl(32, batch_norm_latent=True)),
    "hunyuan_video": ("AutoencoderKLHunyuanVideo", lambda: _kl(16, conv3d=True, time_compress=4)),
    "wan21": ("AutoencoderKLWan", lambda: comfy.ldm.wan.vae.WanVAE(dim=96, z_dim=16, **WAN)),
    "wan22": ("AutoencoderKLWan", lambda: comfy.ldm.wan.vae2_2.WanVAE(dim=160, z_dim=48, **WAN)),
    "mochi": ("AutoencoderKLMochi", comfy.ldm.genmo.vae.model.VideoVAE),
    **{
        f"ltx_{version}": ("AutoencoderKLLTXVideo", lambda number=number: lightricks.VideoVAE(version=number))
        for number, version in enumerate(("090", "091", "095"))
    },
    **({"cogvideox": ("AutoencoderKLCogVideoX", _cogvideox)} if HAS_COGVIDEOX else {}),
    **({"minimax_h3": ("AutoencoderKLMiniMaxH3", _minimax_h3)} if find_spec("comfy.ldm.minimax") else {}),
}
"""diffusers' class, and ComfyUI's module, of each published VAE."""


@dynamic_vram.off()
def published(name: str) -> dict[str, Shape]:
    """Return names and shapes of a published file."""
    with torch.device("meta"):
        return {key: tuple(tensor.shape) for key, tensor in PUBLISHED[name][1]().state_dict().items()}


def squeezed(shape: Shape) -> Shape:
    """Return a shape without dims of 1, which converters add and remove."""
    return tuple(length for length in shape if length != 1)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_fits_diffusers_class(name: str) -> None:
    shapes = published(name)
    found = recognise(shapes, {}, VAES)
    assert found.class_name == PUBLISHED[name][0]
    module = empty(module_class_of(found.class_name), found.config, torch.float32)
    rows = converted(shapes, architecture_of(found.class_name).to_diffusers) if found.native else None
    ours = shapes if rows is None else {
        key: (each.count, *shapes[each.source][1:]) if shapes[each.source] else () for key, each in rows.items()
    }  # fmt: skip
    theirs = {key: tuple(tensor.shape) for key, tensor in module.state_dict().items()}
    assert {key: squeezed(shape) for key, shape in ours.items()} == {
        key: squeezed(shape) for key, shape in theirs.items()
    }


LEVELS = {"down_block_types": [""] * 4, "up_block_types": [""] * 4}
WIDE = "vae.encoder.conv_out.conv.weight"


def _ldm(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return single_file_utils.convert_ldm_vae_checkpoint(tensors, LEVELS)


def _ltx(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert with diffusers, which knows 0.9.5 by the second dim of one layer; rows have just one element."""
    layer = tensors.pop(WIDE.removeprefix("vae."))
    columns = 2048 if "encoder.down_blocks.1.conv.conv.weight" in tensors else 512
    weights = {f"vae.{name}": tensor for name, tensor in tensors.items()} | {WIDE: layer.expand(-1, columns, 1, 1, 1)}
    result: dict[str, torch.Tensor] = single_file_utils.convert_ltx_vae_checkpoint_to_diffusers(weights)
    return result | {"encoder.conv_out.conv.weight": layer}


DIFFUSERS = {
    "sd": _ldm, "flux2": _ldm, "wan21": single_file_utils.convert_wan_vae_to_diffusers,
    "ltx_090": _ltx, "ltx_091": _ltx, "ltx_095": _ltx,
}  # fmt: skip
"""diffusers' converters of published files."""


@pytest.mark.parametrize("name", DIFFUSERS)
def test_names_are_those_of_diffusers_converter(name: str) -> None:
    shapes = published(name)
    ours = converted(shapes, architecture_of(PUBLISHED[name][0]).to_diffusers)
    assert {key: rows for key, rows in ours.items() if not key.startswith("bn.")} == converted(shapes, DIFFUSERS[name])


def halves(encoder: Any, decoder: Any, options: dict[str, Any]) -> dict[str, Shape]:
    """Return names and shapes of a VAE that ComfyUI creates from two parts."""
    with torch.device("meta"):
        modules = {"encoder": encoder(**options), "decoder": decoder(**options)}
    return {
        f"{half}.{name}": tuple(tensor.shape)
        for half, module in modules.items()
        for name, tensor in module.state_dict().items()
    }


def test_hunyuan_image_is_refused() -> None:
    from comfy.ldm.hunyuan_video import vae

    shape = {
        "block_out_channels": [128, 256, 512, 512, 1024, 1024], "in_channels": 3, "out_channels": 3,
        "num_res_blocks": 2, "ffactor_spatial": 32, "z_channels": 64,
    }  # fmt: skip
    with pytest.raises(
        InvalidRequest, match="moves pixels to channels, such as HunyuanImage's, which is not supported"
    ):
        recognise(halves(vae.Encoder, vae.Decoder, shape), {}, VAES)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"refiner_vae": False}, r"convolutions over time .* such as HunyuanVideo 1\.5's, which is not supported"),
        ({}, r"without post_quant_conv, such as HunyuanVideo 1\.5's, which is not supported"),
    ],
)
def test_hunyuan_video_15_is_refused(options: dict[str, Any], message: str) -> None:
    from comfy.ldm.hunyuan_video import vae_refiner

    shape = {
        "block_out_channels": [128, 256, 512, 1024, 1024], "in_channels": 3, "out_channels": 3, "num_res_blocks": 2,
        "ffactor_spatial": 16, "ffactor_temporal": 4, "z_channels": 32,
    }  # fmt: skip
    with pytest.raises(InvalidRequest, match=message):
        recognise(halves(vae_refiner.Encoder, vae_refiner.Decoder, shape | options), {}, VAES)
