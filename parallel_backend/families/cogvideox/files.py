"""CogVideoX 1.5. The files of 2B and 5B do not say how positions and noise are scaled."""

from ...errors import InvalidRequest
from ..architecture import Architecture, Config, Tensors, Weights, layers, renamed

HEAD_DIM = 64


_FIXED: Config = {
    "attention_head_dim": HEAD_DIM,
    "sample_width": 300,
    "sample_height": 300,
    "sample_frames": 81,
    "patch_size": 2,
    "patch_size_t": 2,
    "temporal_compression_ratio": 4,
    "max_text_seq_length": 224,
    "use_rotary_positional_embeddings": True,
    "use_learned_positional_embeddings": False,
}
"""Entries of the config that all published models share."""


def _projection(weights: Weights) -> tuple[int, int]:
    """Return the outputs and the inputs of the projection of patches, which in 2B and 5B is a convolution.

    Raises:
        InvalidRequest: the file holds one of these.
    """
    width, packed, *kernel = weights.shape("patch_embed.proj.weight")
    if kernel:
        raise InvalidRequest(
            "the file holds CogVideoX 2B or 5B, and does not say how their positions and noise are scaled: choose the "
            "model's folder in diffusers layout"
        )
    return width, packed


def _config(weights: Weights) -> Config:
    width, packed = _projection(weights)
    ofs = "ofs_embedding.linear_1.weight"
    return _FIXED | {
        "num_attention_heads": width // HEAD_DIM,
        "in_channels": packed // 8,
        "out_channels": weights.rows("proj_out.weight") // 8,
        "time_embed_dim": weights.columns("transformer_blocks.0.norm1.linear.weight"),
        "ofs_embed_dim": weights.columns(ofs) if ofs in weights else None,
        "text_embed_dim": weights.columns("patch_embed.text_proj.weight"),
        "num_layers": weights.count("transformer_blocks"),
        "patch_bias": "patch_embed.proj.bias" in weights,
    }


_LAYERS = layers("""
    norm_final norm_out ofs_embedding patch_embed proj_out time_embedding
    transformer_blocks(attn1 ff norm1 norm2)
    ofs_embedding_linear_1 ofs_embedding_linear_2 time_embedding_linear_1 time_embedding_linear_2
    blocks(attn_out ff_out ff_proj k norm1 norm2 norm_k norm_q q v)
""")

_NAMES = (
    ("blocks.", "transformer_blocks."), (".q.", ".attn1.to_q."), (".k.", ".attn1.to_k."), (".v.", ".attn1.to_v."),
    ("norm_q.", "attn1.norm_q."), ("norm_k.", "attn1.norm_k."), ("attn_out.", "attn1.to_out.0."),
    ("ff_proj.", "ff.net.0.proj."), ("ff_out.", "ff.net.2."), ("embedding_linear_", "embedding.linear_"),
)  # fmt: skip
"""Parts of ComfyUI's names of CogVideoX, and of diffusers'."""


def _convert(tensors: Tensors) -> Tensors:
    return {renamed(name, _NAMES): tensor for name, tensor in tensors.items()}


ARCHITECTURE = Architecture(
    class_name="CogVideoXTransformer3DModel",
    native=("blocks.0.norm1.linear.weight", "patch_embed.text_proj.weight"),
    diffusers=("transformer_blocks.0.norm1.linear.weight", "patch_embed.text_proj.weight"),
    config=_config,
    convert=_convert,
    layers=_LAYERS,
    foreign={"time_condition_embed.": "CogView4"},
    renamed={"transformer_blocks": "blocks", "ofs_embedding.linear_1": "ofs_embedding_linear_1"},
)
