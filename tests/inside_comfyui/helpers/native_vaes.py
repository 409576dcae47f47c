"""Tiny random VAE modules of ComfyUI, and diffusers' modules with the same weights."""

import re
from collections.abc import Sequence
from typing import Any

import comfy.diffusers_convert
import comfy.ldm.genmo.vae.model
import comfy.ldm.lightricks.vae.causal_video_autoencoder as lightricks
import comfy.ldm.models.autoencoder
import comfy.ldm.wan.vae
import comfy.ldm.wan.vae2_2
import diffusers
import torch
from any_folder_name.parallel_backend.vaes import module_class_of
from diffusers.loaders.single_file_utils import (
    convert_ltx2_vae_to_diffusers,
    convert_ltx_vae_checkpoint_to_diffusers,
    convert_wan_vae_to_diffusers,
)
from helpers import dynamic_vram
from natives import CASES, HAS_COGVIDEOX

Weights = dict[str, torch.Tensor]
Pair = tuple[torch.nn.Module, Any]
"""ComfyUI's module and diffusers' module."""

WIDTHS = {"block_out_channels": [32, 32, 64, 64], "layers_per_block": 1}
KL = {"ch": 32, "ch_mult": [1, 1, 2, 2], "num_res_blocks": 1, "in_channels": 3, "out_ch": 3, "resolution": 32}
IMAGE = WIDTHS | {"down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4}


def randomize(module: Any) -> Any:
    """Set weights that keep the magnitude of activations, and statistics other than 0 and 1."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            random = torch.randn(parameter.shape, generator=generator)
            small = parameter.ndim < 2 or parameter[0].numel() == 1
            parameter.copy_(1.0 + 0.1 * random if small else random * parameter[0].numel() ** -0.5)
        # Replaced, not overwritten: a buffer may be an expanded view.
        for owner in module.modules():
            for name, buffer in owner.named_buffers(recurse=False):
                if buffer.is_floating_point():
                    setattr(owner, name, 0.5 + torch.rand(buffer.shape, generator=generator))
    return module.float().eval().requires_grad_(False)


def _from_diffusers(theirs: Any, channels: int, **options: Any) -> Pair:
    native = comfy.ldm.models.autoencoder.AutoencoderKL(
        ddconfig=KL | {"z_channels": channels, "double_z": True, "attn_resolutions": [], "dropout": 0.0} | options,
        embed_dim=channels,
    )
    native.load_state_dict(comfy.diffusers_convert.convert_vae_state_dict(randomize(theirs).state_dict()))
    return native.float().eval().requires_grad_(False), theirs


def image() -> Pair:
    """Return Stable Diffusion's kind, with 1x1 convolutions around the latent."""
    return _from_diffusers(diffusers.AutoencoderKL(**IMAGE, latent_channels=4), 4)


def flux() -> Pair:
    """Return Flux's kind, without the 1x1 convolutions that older VAEs have."""
    theirs = randomize(
        diffusers.AutoencoderKL(**IMAGE, latent_channels=16, use_quant_conv=False, use_post_quant_conv=False)
    )
    shape = KL | {"z_channels": 16, "double_z": True, "attn_resolutions": [], "dropout": 0.0}
    parts = "comfy.ldm.modules.diffusionmodules.model"
    native = comfy.ldm.models.autoencoder.AutoencodingEngine(
        regularizer_config={"target": "comfy.ldm.models.autoencoder.DiagonalGaussianRegularizer"},
        encoder_config={"target": f"{parts}.Encoder", "params": shape},
        decoder_config={"target": f"{parts}.Decoder", "params": shape},
    )
    native.load_state_dict(comfy.diffusers_convert.convert_vae_state_dict(theirs.state_dict()))
    return native.float().eval().requires_grad_(False), theirs


def flux2() -> Pair:
    """Return Flux.2's kind, with a batch norm."""
    return _from_diffusers(diffusers.AutoencoderKLFlux2(**IMAGE, latent_channels=4), 4, batch_norm_latent=True)


def hunyuan_video() -> Pair:
    """Return the kind with convolutions over time."""
    theirs = diffusers.AutoencoderKLHunyuanVideo(**WIDTHS, latent_channels=16)
    return _from_diffusers(theirs, 16, conv3d=True, time_compress=4)


def wan21() -> Pair:
    """Return Wan 2.1's kind with 16 channels, which Qwen-Image shares."""
    shape = {"z_dim": 16, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "temperal_downsample": [False, True, True]}
    native = randomize(comfy.ldm.wan.vae.WanVAE(dim=4, **shape))
    theirs = diffusers.AutoencoderKLWan(base_dim=4, **shape)
    theirs.load_state_dict(convert_wan_vae_to_diffusers(native.state_dict()))
    return native, theirs.eval()


def qwen_image() -> Pair:
    """Return ``wan21`` with diffusers' class for Qwen-Image."""
    native, wan = wan21()
    theirs = diffusers.AutoencoderKLQwenImage(base_dim=4)
    theirs.load_state_dict(wan.state_dict())
    return native, theirs.eval()


def wan22() -> Pair:
    """Return Wan 2.2's kind with patches of 2x2 pixels."""
    shape = {"z_dim": 48, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "temperal_downsample": [False, True, True]}
    native = randomize(comfy.ldm.wan.vae2_2.WanVAE(dim=4, dec_dim=8, **shape))
    theirs = diffusers.AutoencoderKLWan(
        base_dim=4, decoder_base_dim=8, **shape, is_residual=True, in_channels=12, out_channels=12, patch_size=2,
        scale_factor_spatial=16, latents_mean=[0.0] * 48, latents_std=[1.0] * 48,
    )  # fmt: skip
    theirs.load_state_dict({_wan22_name(name): tensor for name, tensor in native.state_dict().items()})
    return native, theirs.eval()


def _wan22_name(name: str) -> str:
    for pattern, replacement in (
        (r"^conv1", "quant_conv"), (r"^conv2", "post_quant_conv"), (r"coder\.conv1", "coder.conv_in"),
        (r"head\.0", "norm_out"), (r"head\.2", "conv_out"), (r"middle\.0", "mid_block.resnets.0"),
        (r"middle\.1", "mid_block.attentions.0"), (r"middle\.2", "mid_block.resnets.1"),
        (r"downsamples\.(\d)\.downsamples\.\d\.(resample|time_conv)", r"down_blocks.\1.downsampler.\2"),
        (r"upsamples\.(\d)\.upsamples\.\d\.(resample|time_conv)", r"up_blocks.\1.upsampler.\2"),
        (r"downsamples\.(\d)\.downsamples\.", r"down_blocks.\1.resnets."),
        (r"upsamples\.(\d)\.upsamples\.", r"up_blocks.\1.resnets."),
        (r"residual\.0", "norm1"), (r"residual\.2", "conv1"), (r"residual\.3", "norm2"), (r"residual\.6", "conv2"),
        (r"\.shortcut", ".conv_shortcut"),
    ):  # fmt: skip
        name = re.sub(pattern, replacement, name)
    return name


@dynamic_vram.off()
def ltx() -> Pair:
    """Return LTX-Video 0.9.0's kind."""
    down = [["res_x", 1], ["compress_all", 1], ["res_x_y", 1]] * 2
    blocks = [*down, ["res_x", 1], ["compress_all", 1], ["res_x", 1], ["res_x", 1]]
    theirs = diffusers.AutoencoderKLLTXVideo(
        block_out_channels=[8, 16, 32, 32], decoder_block_out_channels=[8, 16, 32, 32], layers_per_block=[1] * 5,
        decoder_layers_per_block=[1] * 5,
    )  # fmt: skip
    return _ltx(theirs, encoder_blocks=blocks, decoder_blocks=blocks)


@dynamic_vram.off()
def ltx_noisy() -> Pair:
    """Return LTX-Video 0.9.1's kind: a timestep, and noise before and inside the decoder."""
    down = [["res_x", {"num_layers": 1}], ["compress_all", {}], ["res_x_y", 1]] * 2
    encoder = [*down, ["res_x", {"num_layers": 1}], ["compress_all", {}], *[["res_x", {"num_layers": 1}]] * 2]
    noisy = {"num_layers": 1, "inject_noise": True}
    up = [["res_x", noisy], ["compress_all", {"residual": True, "multiplier": 2}]] * 3
    theirs = diffusers.AutoencoderKLLTXVideo(
        block_out_channels=[8, 16, 32, 32], layers_per_block=[1] * 5, decoder_block_out_channels=[16, 32, 64],
        decoder_layers_per_block=[1] * 4, decoder_spatio_temporal_scaling=[True] * 3,
        decoder_inject_noise=[True, True, True, False], upsample_residual=[True] * 3, upsample_factor=[2] * 3,
        timestep_conditioning=True,
    )  # fmt: skip
    decoder = [*up, ["res_x", {"num_layers": 1, "inject_noise": False}]]
    return _ltx(theirs, encoder_blocks=encoder, decoder_blocks=decoder, timestep_conditioning=True)


@dynamic_vram.off()
def ltx_moved() -> Pair:
    """Return LTX-Video 0.9.5's kind, whose encoder moves pixels to channels."""
    down = [f"compress_{kind}_res" for kind in ("space", "time", "all", "all")]
    encoder = [block for kind in down for block in (["res_x", {"num_layers": 1}], [kind, {"multiplier": 2}])]
    up = [["res_x", {"num_layers": 1}], ["compress_all", {"residual": True, "multiplier": 2}]] * 3
    theirs = diffusers.AutoencoderKLLTXVideo(
        block_out_channels=[8, 16, 32, 64, 128], layers_per_block=[1] * 5,
        down_block_types=["LTXVideo095DownBlock3D"] * 4, spatio_temporal_scaling=[True] * 4,
        downsample_type=["spatial", "temporal", "spatiotemporal", "spatiotemporal"],
        decoder_block_out_channels=[16, 32, 64], decoder_layers_per_block=[1] * 4,
        decoder_spatio_temporal_scaling=[True] * 3, decoder_inject_noise=[False] * 4, upsample_residual=[True] * 3,
        upsample_factor=[2] * 3, timestep_conditioning=True, spatial_compression_ratio=32, temporal_compression_ratio=8,
    )  # fmt: skip
    rest = [["res_x", {"num_layers": 1}]]
    return _ltx(theirs, encoder_blocks=encoder + rest, decoder_blocks=up + rest, timestep_conditioning=True)


@dynamic_vram.off()
def ltx2() -> Pair:
    """Return LTX-2.3's kind, whose decoder upsamples space and time also apart, and adds no input."""
    down = [f"compress_{kind}_res" for kind in ("space", "time", "all", "all")]
    one = ["res_x", {"num_layers": 1}]
    encoder = [block for kind in down for block in (one, [kind, {"multiplier": 2}])]
    up = [("space", 2), ("time", 2), ("all", 1), ("all", 2)]
    decoder = [block for kind, factor in up for block in (one, [f"compress_{kind}", {"multiplier": factor}])]
    theirs = module_class_of("AutoencoderKLLTXVideo")(
        block_out_channels=[8, 16, 32, 64, 128], layers_per_block=[1] * 5,
        down_block_types=["LTXVideo095DownBlock3D"] * 4, spatio_temporal_scaling=[True] * 4,
        downsample_type=["spatial", "temporal", "spatiotemporal", "spatiotemporal"],
        decoder_block_out_channels=[16, 32, 32, 64], decoder_layers_per_block=[1] * 5,
        decoder_spatio_temporal_scaling=[True] * 4, decoder_inject_noise=[False] * 5, upsample_residual=[False] * 4,
        upsample_type=["spatial", "temporal", "spatiotemporal", "spatiotemporal"], upsample_factor=[2, 2, 1, 2],
        spatial_compression_ratio=32, temporal_compression_ratio=8,
    )  # fmt: skip
    return _ltx(theirs, encoder_blocks=[*encoder, one], decoder_blocks=[*decoder, one])


def _ltx(theirs: Any, *, encoder_blocks: Any, decoder_blocks: Any, timestep_conditioning: bool = False) -> Pair:
    shape = {"dims": 3, "base_channels": 8, "patch_size": 4, "norm_layer": "pixel_norm"}
    native = lightricks.VideoVAE(config={"dims": 3, "latent_channels": 128, "blocks": [], "norm_layer": "pixel_norm"})
    native.timestep_conditioning = timestep_conditioning
    native.encoder = lightricks.Encoder(
        in_channels=3, out_channels=128, blocks=encoder_blocks, latent_log_var="uniform", **shape
    )
    native.decoder = lightricks.Decoder(
        in_channels=128, out_channels=3, blocks=decoder_blocks, causal=False, spatial_padding_mode="reflect",
        timestep_conditioning=timestep_conditioning, **shape,
    )  # fmt: skip
    randomize(native)
    weights = {f"vae.{name}": tensor.clone() for name, tensor in native.state_dict().items()}
    if theirs.config.get("upsample_type"):
        theirs.load_state_dict(_ltx2_weights(weights))
        return native, theirs.eval()
    theirs.load_state_dict(_ltx_weights(weights, theirs.config.down_block_types[0]))
    return native, theirs.eval()


def _ltx2_weights(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Convert to diffusers' names. diffusers' converter knows LTX-2's blocks, of which 2.3 has one more."""
    more = (("up_blocks.7.", "up_blocks.3.upsamplers.0."), ("up_blocks.8.", "up_blocks.3."))
    converted: dict[str, torch.Tensor] = convert_ltx2_vae_to_diffusers(weights)
    for old, new in more:
        converted = {name.replace(old, new): tensor for name, tensor in converted.items()}
    return converted


def _ltx_weights(weights: dict[str, torch.Tensor], down_block: str) -> dict[str, torch.Tensor]:
    """Convert to diffusers' names. diffusers' converter knows 0.9.5 by the published width of one layer."""
    name = "encoder.conv_out.conv.weight"
    layer = weights[f"vae.{name}"]
    if down_block == "LTXVideo095DownBlock3D":
        weights[f"vae.{name}"] = torch.empty(0, 2048)
    converted: dict[str, torch.Tensor] = convert_ltx_vae_checkpoint_to_diffusers(weights)
    return converted | {name: layer}


@dynamic_vram.off()
def native_mochi(res_blocks: Sequence[int]) -> Any:
    """Return ComfyUI's Mochi, built from parts because its class has a fixed width."""
    widths = {"base_channels": 32, "channel_multipliers": [1, 2, 3, 4], "latent_dim": 12}
    common = widths | {"num_res_blocks": list(res_blocks), "padding_mode": "replicate"}
    native = comfy.ldm.genmo.vae.model.VideoVAE.__new__(comfy.ldm.genmo.vae.model.VideoVAE)
    torch.nn.Module.__init__(native)
    native.encoder = comfy.ldm.genmo.vae.model.Encoder(
        in_channels=15, temporal_reductions=[1, 2, 3], spatial_reductions=[2] * 3, prune_bottlenecks=[False] * 5,
        has_attentions=[False, True, True, True, True], input_is_conv_1x1=True, **common,
    )  # fmt: skip
    native.decoder = comfy.ldm.genmo.vae.model.Decoder(
        temporal_expansions=[1, 2, 3], spatial_expansions=[2] * 3, has_attention=[False] * 5, output_norm=False,
        affine=True, bias=True, **common,
    )  # fmt: skip
    return randomize(native)


@dynamic_vram.off()
def mochi() -> Pair:
    """Return Mochi's kind with the fewest layers."""
    native = native_mochi([1] * 5)
    channels = [32, 64, 96, 128]
    theirs = diffusers.AutoencoderKLMochi(
        encoder_block_out_channels=channels, decoder_block_out_channels=channels, layers_per_block=[1] * 5
    )
    # The layers have the same order, except that diffusers splits ``qkv`` in three.
    tensors = [
        part
        for name, tensor in native.state_dict().items()
        for part in (tensor.chunk(3) if name.endswith("qkv.weight") else [tensor])
    ]
    theirs.load_state_dict(dict(zip(theirs.state_dict(), tensors, strict=True)))
    return native, theirs.eval()


def cogvideox() -> Pair:
    """Return CogVideoX's kind, which older versions of ComfyUI lack."""
    from comfy.ldm.cogvideo.vae import AutoencoderKLCogVideoX

    native = randomize(AutoencoderKLCogVideoX(block_out_channels=(32, 32, 64, 64), layers_per_block=1))
    theirs = diffusers.AutoencoderKLCogVideoX(
        **WIDTHS, latent_channels=16, down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4,
    )  # fmt: skip
    theirs.load_state_dict(native.state_dict())
    return native, theirs.eval()


NATIVE = {
    create.__name__: create
    for create in (
        image, flux, flux2, wan21, wan22, qwen_image, hunyuan_video, ltx, ltx_noisy, ltx_moved, mochi,
        *([ltx2] if "ltx2 2.3" in CASES else []), *([cogvideox] if HAS_COGVIDEOX else []),
    )
}  # fmt: skip

# ComfyUI's HunyuanVideo differs between versions, and from the model's own code, in which frames attend to each other.
# Its CogVideoX normalizes other groups of frames together than the model's own code does. Ours equal diffusers', as
# tests/unit checks. With one frame all are equal.
FRAMES = {"image": None, "flux": None, "flux2": None, "hunyuan_video": 1, "cogvideox": 1}
"""Latent frames for which the pair computes the same, if not any number. None means images."""


def native_decode(native: Any, latent: torch.Tensor) -> torch.Tensor:
    """Decode with ComfyUI's VAE. Its noise has our seed."""
    torch.manual_seed(0)
    with torch.no_grad():
        return ((native.decode(latent.to(_dtype(native))).float() + 1) / 2).clamp(0, 1).movedim(1, -1)


def native_encode(native: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Encode with ComfyUI's VAE."""
    with torch.no_grad():
        latent: torch.Tensor = native.encode((pixels.movedim(-1, 1) * 2 - 1).to(_dtype(native)))
    return latent.float()


def _dtype(native: Any) -> torch.dtype:
    """Return the dtype of a module's weights, to which ComfyUI's VAE rounds what it is given."""
    dtype: torch.dtype = next(native.parameters()).dtype
    return dtype


PUBLISHED_WIDTHS = {"block_out_channels": [128, 256, 512, 512], "layers_per_block": 2}
"""Those of ComfyUI's own classes, which do not follow a file."""


def _wide(theirs: Any) -> Weights:
    weights: Weights = comfy.diffusers_convert.convert_vae_state_dict(randomize(theirs).state_dict())
    return weights


def image_weights() -> Weights:
    """Return the kind of Flux, as wide as ComfyUI's own class for it."""
    widths = IMAGE | PUBLISHED_WIDTHS | {"latent_channels": 16}
    return _wide(diffusers.AutoencoderKL(**widths, use_quant_conv=False, use_post_quant_conv=False))


def flux2_weights() -> Weights:
    """Return the kind of Flux.2, as wide as ComfyUI's own class for it."""
    return _wide(diffusers.AutoencoderKLFlux2(**(IMAGE | PUBLISHED_WIDTHS)))


def hunyuan_video_weights() -> Weights:
    """Return the kind of HunyuanVideo, as wide as ComfyUI's own class for it."""
    return _wide(diffusers.AutoencoderKLHunyuanVideo(**PUBLISHED_WIDTHS, latent_channels=16))


def video_weights() -> Weights:
    """Return the kind of Wan 2.1."""
    weights: Weights = wan21()[0].state_dict()
    return weights
