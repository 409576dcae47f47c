"""Open-Sora 1.2's VAE in the published names, which our module has, too."""

from ...errors import InvalidRequest
from ...families.architecture import Architecture, Config, Weights

CLASS_NAME = "VideoAutoencoderPipeline"

_CHUNK, _CHANNELS = 17, 4
_SPATIAL, _TEMPORAL = "spatial_vae.module", "temporal_vae"


def _config(weights: Weights) -> Config:
    latent = weights.columns(f"{_TEMPORAL}.post_quant_conv.conv.weight")
    if latent != _CHANNELS:
        raise InvalidRequest(
            f"the file holds an Open-Sora VAE whose latents have {latent} channels, as 1.3's has, which is not "
            "supported: choose OpenSora-VAE-v1.2"
        )
    described = weights.beside(CLASS_NAME)
    widths = [
        weights.rows(f"{_TEMPORAL}.encoder.block_res_blocks.{level}.0.conv1.conv.weight")
        for level in range(weights.count(f"{_TEMPORAL}.encoder.block_res_blocks"))
    ]
    between = range(len(widths) - 1)
    return {
        **_spatial(weights),
        "filters": widths[0],
        "channel_multipliers": [width // widths[0] for width in widths],
        "temporal_downsample": [f"{_TEMPORAL}.encoder.conv_blocks.{level}.conv.weight" in weights for level in between],
        "num_res_blocks": weights.count(f"{_TEMPORAL}.encoder.block_res_blocks.0"),
        "in_out_channels": weights.columns(f"{_TEMPORAL}.encoder.conv_in.conv.weight"),
        "latent_embed_dim": latent,
        "embed_dim": weights.rows(f"{_TEMPORAL}.post_quant_conv.conv.weight"),
        "micro_frame_size": described.get("micro_frame_size", _CHUNK),
    }


def _spatial(weights: Weights) -> Config:
    blocks = f"{_SPATIAL}.encoder.down_blocks"
    levels = range(weights.count(blocks))
    return {
        "block_out_channels": [weights.rows(f"{blocks}.{level}.resnets.0.conv1.weight") for level in levels],
        "layers_per_block": weights.count(f"{blocks}.0.resnets"),
    }


OPEN_SORA1_VAE = Architecture(
    class_name=CLASS_NAME,
    native=(),
    diffusers=(
        f"{_SPATIAL}.encoder.conv_in.weight", f"{_SPATIAL}.decoder.conv_in.weight",
        f"{_TEMPORAL}.encoder.conv_in.conv.weight", f"{_TEMPORAL}.post_quant_conv.conv.weight",
    ),
    config=_config,
)  # fmt: skip
