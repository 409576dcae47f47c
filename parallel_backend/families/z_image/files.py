"""Z-Image and Z-Image-Turbo."""

from ..architecture import Architecture, Config, Weights, layers, single_file

_FIXED: Config = {
    "all_patch_size": [2],
    "all_f_patch_size": [1],
    "norm_eps": 1e-5,
    "qk_norm": True,
    "siglip_feat_dim": None,
    "rope_theta": 256.0,
    "t_scale": 1000.0,
    "axes_dims": [32, 48, 48],
    "axes_lens": [1536, 512, 512],
}
"""Entries of the config that all published models share."""


def _config(weights: Weights) -> Config:
    said = weights.described("transformer").get("allow_fp16")
    # diffusers ignores names that begin with an underscore.
    own = {} if said is None else {"_allow_fp16": said}
    width, head_dim = weights.rows("cap_embedder.1.weight"), weights.rows("layers.0.attention.norm_q.weight")
    return (
        _FIXED
        | own
        | {
            "in_channels": weights.columns("all_x_embedder.2-1.weight") // 4,
            "dim": width,
            "n_layers": weights.count("layers"),
            "n_refiner_layers": weights.count("noise_refiner"),
            "n_heads": width // head_dim,
            "n_kv_heads": width // head_dim,
            "cap_feat_dim": weights.columns("cap_embedder.1.weight"),
        }
    )


_LAYERS = layers("""
    all_final_layer all_x_embedder cap_embedder cap_pad_token final_layer t_embedder x_embedder x_pad_token
    context_refiner(attention attention_norm1 attention_norm2 feed_forward ffn_norm1 ffn_norm2)
    noise_refiner(adaLN_modulation attention attention_norm1 attention_norm2 feed_forward ffn_norm1 ffn_norm2)
    layers(adaLN_modulation attention attention_norm1 attention_norm2 feed_forward ffn_norm1 ffn_norm2)
""")

ARCHITECTURE = Architecture(
    class_name="ZImageTransformer2DModel",
    native=("cap_embedder.1.weight", "noise_refiner.0.attention.k_norm.weight", "cap_pad_token"),
    diffusers=("cap_embedder.1.weight", "noise_refiner.0.attention.norm_k.weight", "cap_pad_token"),
    config=_config,
    convert=single_file("convert_z_image_transformer_checkpoint_to_diffusers"),
    layers=_LAYERS,
    unused=frozenset({"norm_final.weight"}),
    one_first={"cap_pad_token": 2, "x_pad_token": 2},
    renamed={"layers.0.attention.norm_q": "layers.0.attention.q_norm", "all_x_embedder.2-1": "x_embedder"},
    foreign={"siglip_embedder.": "Z-Image-Omni", "dec_net.": "Z-Image in pixel space",
             "clip_text_pooled_proj.": "NewBie"},
)  # fmt: skip
