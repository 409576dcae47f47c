"""HunyuanVideo's VAE."""

from ...families.architecture import Architecture, Config, Weights, not_supported
from .vae_images import ldm_names, level_widths


def _config(weights: Weights) -> Config:
    if "post_quant_conv.weight" not in weights:
        raise not_supported("the file holds a VAE without post_quant_conv, such as HunyuanVideo 1.5's")
    widths = level_widths(weights, "conv1.conv")
    return {
        "in_channels": weights.columns("encoder.conv_in.conv.weight"),
        "out_channels": weights.rows("decoder.conv_out.conv.weight"),
        "latent_channels": weights.columns("decoder.conv_in.conv.weight"),
        "down_block_types": ["HunyuanVideoDownBlock3D"] * len(widths),
        "up_block_types": ["HunyuanVideoUpBlock3D"] * len(widths),
        "block_out_channels": widths,
        "layers_per_block": weights.count("encoder.down_blocks.0.resnets"),
        "spatial_compression_ratio": 2 ** (len(widths) - 1),
        "temporal_compression_ratio": 4,
        "scaling_factor": None,
    }


HUNYUAN_VIDEO_VAE = Architecture(
    class_name="AutoencoderKLHunyuanVideo",
    native=("decoder.conv_in.conv.weight", "decoder.mid.attn_1.q.weight"),
    diffusers=("decoder.conv_in.conv.weight", "decoder.mid_block.attentions.0.to_q.weight"),
    config=_config,
    in_diffusers=ldm_names,
)
