"""MiniMax-H3's video VAE."""

from collections.abc import Iterable

from ...families.architecture import Architecture, Config, Tensors, Weights, renamed

_HEAD = 64
"""Channels of an attention head, which a file does not show."""

# Published with MiniMax-H3; ComfyUI takes them for a file that does not hold them.
_MEAN = (
    0.85809034, -0.96065915, 1.066164, -0.50903255, -0.2727582, -1.3675414, -0.2553255, -0.26907554,
    -0.5376841, -0.04640973, 0.66573703, 0.19690128, -0.5460608, -0.4035342, -0.23683025, 0.25928453,
    -0.30133945, 0.21134199, -1.1206849, 0.35819334, -0.042251438, 0.260483, 0.22864093, 0.7056032,
)  # fmt: skip
_STD = (
    1.2223774, 1.2767264, 1.6831775, 1.7549455, 1.5636216, 2.1941435, 0.9653138, 1.0569886,
    0.8419489, 0.7729953, 1.8955938, 0.94684184, 0.79968095, 0.449889, 0.71974, 0.6936293,
    2.961095, 2.76942, 3.0496185, 2.1088054, 3.2762263, 3.1627357, 2.2816813, 2.6127844,
)  # fmt: skip

_PARTS = (
    ("encoder.down.", "encoder.down_blocks."), (".block.", ".resnets."), (".downsample.", ".downsamplers.0."),
    (".nin_shortcut.", ".conv_shortcut."), ("decoder.x_embedder.", "decoder.proj_in."),
    (".attn.to_out.", ".attn.to_out.0."), (".ff.w1.", ".ff.net.0.proj."), (".ff.w2.", ".ff.net.2."),
    ("latents_mean", "latent_mean"), ("latents_std", "latent_std"),
)  # fmt: skip
"""Parts of the published names and of diffusers'."""

_MASK = "decoder.mask_token"
"""What only training needs."""


def _config(weights: Weights) -> Config:
    downs = [f"encoder.down_blocks.{level}" for level in range(weights.count("encoder.down_blocks"))]
    blocks = "decoder.transformer_blocks"
    width, latent = weights.rows("decoder.proj_in.weight"), weights.columns("post_quant_conv.weight")
    held = "latent_mean" in weights and "latent_std" in weights
    return {
        "in_channels": weights.columns("encoder.conv_in.weight"),
        "out_channels": 3,
        "latent_channels": latent,
        "block_out_channels": [weights.rows(f"{down}.resnets.0.conv1.weight") for down in downs],
        "layers_per_block": weights.count(f"{downs[0]}.resnets"),
        "decoder_num_layers": weights.count(blocks),
        "decoder_num_attention_heads": width // _HEAD,
        "decoder_attention_head_dim": _HEAD,
        "decoder_num_register_tokens": weights.columns("decoder.register_tokens"),
        "decoder_ffn_mult": weights.columns(f"{blocks}.0.ff.net.2.weight") // width,
        "latents_mean": None if held else list(_MEAN),
        "latents_std": None if held else list(_STD),
    }


def _names(names: Iterable[str]) -> dict[str, str]:
    """Return diffusers' names by the published ones; ``to_qkv`` stands for the three layers that it is split into."""
    return {name: renamed(name, _PARTS) for name in names if name != _MASK}


def _convert(tensors: Tensors) -> Tensors:
    converted: Tensors = {}
    for name, new in _names(tensors).items():
        tensor = tensors[name]
        if ".to_qkv." in new:
            # Each head has its query, its key and its value.
            of_heads = tensor.unflatten(0, (-1, 3, _HEAD))
            for i, layer in enumerate(("to_q", "to_k", "to_v")):
                converted[new.replace("to_qkv", layer)] = of_heads[:, i].flatten(0, 1)
        elif ".ff.net.0." in new:
            # The gate comes first, and diffusers' comes last.
            converted[new] = tensor.unflatten(0, (2, -1)).flip(0).flatten(0, 1)
        else:
            converted[new] = tensor
    return converted


MINIMAX_H3_VAE = Architecture(
    class_name="AutoencoderKLMiniMaxH3",
    native=(
        "decoder.transformer_blocks.0.scale1", "encoder.down.5.block.0.conv1.weight", "decoder.x_embedder.weight",
    ),
    diffusers=(
        "decoder.transformer_blocks.0.scale1", "encoder.down_blocks.0.resnets.0.conv1.weight",
        "decoder.proj_in.weight",
    ),
    config=_config,
    convert=_convert,
    in_diffusers=_names,
    unused=frozenset({_MASK}),
)  # fmt: skip
