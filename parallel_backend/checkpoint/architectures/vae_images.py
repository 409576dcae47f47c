"""VAEs of images: AutoencoderKL (Stable Diffusion, Flux.1, PixArt, Z-Image) and Flux.2's."""

import re
from collections.abc import Iterable

from ...errors import InvalidRequest
from ...families.architecture import Architecture, Config, Weights, not_supported, renamed

_PARTS = (
    ("encoder.down.", "encoder.down_blocks."), (".block.", ".resnets."), (".downsample.", ".downsamplers.0."),
    (".upsample.", ".upsamplers.0."), (".nin_shortcut.", ".conv_shortcut."), (".norm_out.", ".conv_norm_out."),
    (".mid.block_1.", ".mid_block.resnets.0."), (".mid.block_2.", ".mid_block.resnets.1."),
    (".mid.attn_1.norm.", ".mid_block.attentions.0.group_norm."), (".mid.attn_1.q.", ".mid_block.attentions.0.to_q."),
    (".mid.attn_1.k.", ".mid_block.attentions.0.to_k."), (".mid.attn_1.v.", ".mid_block.attentions.0.to_v."),
    (".mid.attn_1.proj_out.", ".mid_block.attentions.0.to_out.0."),
    (".attentions.0.query.", ".attentions.0.to_q."), (".attentions.0.key.", ".attentions.0.to_k."),
    (".attentions.0.value.", ".attentions.0.to_v."), (".attentions.0.proj_attn.", ".attentions.0.to_out.0."),
    ("encoder.quant_conv.", "quant_conv."), ("decoder.post_quant_conv.", "post_quant_conv."),
)  # fmt: skip
"""Parts of the original names and of diffusers' former ones, and of diffusers'."""

_UP = re.compile(r"decoder\.up\.(\d+)\.")


def ldm_names(names: Iterable[str]) -> dict[str, str]:
    """Return diffusers' names by those of latent diffusion's autoencoders.

    These number the decoder's levels from the finest to the coarsest one.
    """
    names = list(names)
    last = max((int(found[1]) for name in names if (found := _UP.match(name))), default=0)

    def level(found: re.Match[str]) -> str:
        return f"decoder.up_blocks.{last - int(found[1])}."

    return {name: renamed(_UP.sub(level, name), _PARTS) for name in names}


def level_widths(weights: Weights, layer: str) -> list[int]:
    """Return the width of each level of the encoder, from the finest on.

    Args:
        weights: the weights, by diffusers' names.
        layer: name of a level's first convolution.
    """
    levels = range(weights.count("encoder.down_blocks"))
    return [weights.rows(f"encoder.down_blocks.{i}.resnets.0.{layer}.weight") for i in levels]


def _image(weights: Weights) -> Config:
    widths = level_widths(weights, "conv1")
    _refuse_other_layers(weights, widths)
    return {
        "in_channels": weights.columns("encoder.conv_in.weight"),
        "out_channels": weights.rows("decoder.conv_out.weight"),
        "down_block_types": ["DownEncoderBlock2D"] * len(widths),
        "up_block_types": ["UpDecoderBlock2D"] * len(widths),
        "block_out_channels": widths,
        "layers_per_block": weights.count("encoder.down_blocks.0.resnets"),
        "latent_channels": weights.columns("decoder.conv_in.weight"),
        "use_quant_conv": "quant_conv.weight" in weights,
        "use_post_quant_conv": "post_quant_conv.weight" in weights,
        "mid_block_add_attention": "encoder.mid_block.attentions.0.to_q.weight" in weights,
    }


def _refuse_other_layers(weights: Weights, widths: list[int]) -> None:
    """Refuse the VAEs of other models, whose layers have the same names.

    Raises:
        InvalidRequest: convolutions over time, or a downsampling that moves pixels to channels.
    """
    shape = weights.shape("decoder.conv_in.weight")
    if len(shape) != 4:
        raise not_supported(
            f"the file holds a VAE with convolutions over time (decoder.conv_in.weight has shape {list(shape)}), such "
            "as HunyuanVideo 1.5's"
        )
    if len(widths) > 1 and weights.rows("encoder.down_blocks.0.downsamplers.0.conv.weight") != widths[0]:
        raise not_supported("the file holds a VAE that moves pixels to channels, such as HunyuanImage's")


def _kl(weights: Weights) -> Config:
    config = _image(weights)
    decoder = _decoder_widths(weights, len(config["block_out_channels"]))
    if decoder != config["block_out_channels"]:
        raise InvalidRequest(
            f"the VAE's decoder has widths {decoder}, and its encoder {config['block_out_channels']}; they must be the "
            "same: choose another VAE, or load this one with ComfyUI's own loader"
        )
    return config | {"scaling_factor": None, "shift_factor": None}


def _flux2(weights: Weights) -> Config:
    config = _image(weights)
    decoder = _decoder_widths(weights, len(config["block_out_channels"]))
    patches = weights.rows("bn.running_mean") // config["latent_channels"]
    side = round(patches**0.5)
    other = {} if decoder == config["block_out_channels"] else {"decoder_block_out_channels": decoder}
    return config | other | {"batch_norm_eps": 1e-4, "patch_size": [side, side]}


def _decoder_widths(weights: Weights, levels: int) -> list[int]:
    return [weights.rows(f"decoder.up_blocks.{levels - 1 - i}.resnets.0.conv1.weight") for i in range(levels)]


_NATIVE = ("encoder.down.0.block.0.norm1.weight", "decoder.conv_in.weight", "decoder.mid.attn_1.q.weight")
_DIFFUSERS = ("encoder.down_blocks.0.resnets.0.norm1.weight", "decoder.conv_in.weight",
              "decoder.up_blocks.0.resnets.0.norm1.weight")  # fmt: skip
_FOREIGN = {
    "mix_factor": "Stable Video Diffusion's VAE", "quantize.": "a VQ model",
    ".attn.0.": "a VAE with attention at several levels",
}  # fmt: skip

AUTOENCODER_KL = Architecture(
    class_name="AutoencoderKL",
    native=_NATIVE,
    diffusers=_DIFFUSERS,
    config=_kl,
    in_diffusers=ldm_names,
    foreign=_FOREIGN,
)

FORMER_AUTOENCODER_KL = Architecture(
    class_name="AutoencoderKL",
    native=(*_DIFFUSERS, "decoder.mid_block.attentions.0.query.weight"),
    diffusers=(),
    config=_kl,
    in_diffusers=ldm_names,
)
"""Files in the names that diffusers had at first, as those of Stable Diffusion 1.5's VAE."""

FLUX2_VAE = Architecture(
    class_name="AutoencoderKLFlux2",
    native=(*_NATIVE, "bn.running_mean"),
    diffusers=(*_DIFFUSERS, "bn.running_mean"),
    config=_flux2,
    in_diffusers=ldm_names,
)
