"""CogVideoX's VAE, whose names in ComfyUI are diffusers'."""

from ...families.architecture import Architecture, Config, Weights
from .vae_images import level_widths


def _config(weights: Weights) -> Config:
    widths = level_widths(weights, "conv1.conv")
    return {
        "in_channels": weights.columns("encoder.conv_in.conv.weight"),
        "out_channels": weights.rows("decoder.conv_out.conv.weight"),
        "down_block_types": ["CogVideoXDownBlock3D"] * len(widths),
        "up_block_types": ["CogVideoXUpBlock3D"] * len(widths),
        "block_out_channels": widths,
        "latent_channels": weights.columns("decoder.conv_in.conv.weight"),
        "layers_per_block": weights.count("encoder.down_blocks.0.resnets"),
        "temporal_compression_ratio": 4,
        "scaling_factor": None,
    }


COGVIDEOX_VAE = Architecture(
    class_name="AutoencoderKLCogVideoX",
    native=(),
    diffusers=("decoder.conv_in.conv.weight", "decoder.mid_block.resnets.0.norm1.norm_layer.weight"),
    config=_config,
)
