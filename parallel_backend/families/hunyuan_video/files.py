"""HunyuanVideo: text to video, and image to video with a replaced first frame or with concatenated channels.

Text to video and a replaced first frame (v2) have the same weights. The config is v2's, which can do both.
"""

from ..architecture import Architecture, Config, Tensors, Weights, layers, renamed, single_file
from ..shared.fused_layers import split_linear1


def _config(weights: Weights) -> Config:
    width, in_channels, patch_frames, patch, _ = weights.shape("x_embedder.proj.weight")
    head_dim = weights.rows("transformer_blocks.0.attn.norm_q.weight")
    out_channels = weights.rows("proj_out.weight") // (patch_frames * patch**2)
    return {
        "in_channels": in_channels,
        "out_channels": out_channels,
        "num_attention_heads": width // head_dim,
        "attention_head_dim": head_dim,
        "num_layers": weights.count("transformer_blocks"),
        "num_single_layers": weights.count("single_transformer_blocks"),
        "num_refiner_layers": weights.count("context_embedder.token_refiner.refiner_blocks"),
        "mlp_ratio": weights.rows("transformer_blocks.0.ff.net.0.proj.weight") / width,
        "patch_size": patch,
        "patch_size_t": patch_frames,
        "qk_norm": "rms_norm",
        "guidance_embeds": "time_text_embed.guidance_embedder.linear_1.weight" in weights,
        "text_embed_dim": weights.columns("context_embedder.proj_in.weight"),
        "pooled_projection_dim": weights.columns("time_text_embed.text_embedder.linear_1.weight"),
        "rope_theta": 256.0,
        "rope_axes_dim": [16, 56, 56],
        "image_condition_type": "token_replace" if in_channels == out_channels else None,
    }


_PUBLISHED = (
    ("txt_in.t_embedder.in_layer.", "txt_in.t_embedder.mlp.0."),
    ("txt_in.t_embedder.out_layer.", "txt_in.t_embedder.mlp.2."),
    ("txt_in.c_embedder.in_layer.", "txt_in.c_embedder.linear_1."),
    ("txt_in.c_embedder.out_layer.", "txt_in.c_embedder.linear_2."),
    ("time_in.in_layer.", "time_in.mlp.0."), ("time_in.out_layer.", "time_in.mlp.2."),
    ("guidance_in.in_layer.", "guidance_in.mlp.0."), ("guidance_in.out_layer.", "guidance_in.mlp.2."),
    ("_mod.lin.", "_mod.linear."), ("modulation.lin.", "modulation.linear."),
    ("attn.qkv.", "attn_qkv."), ("attn.proj.", "attn_proj."),
    ("attn.norm.query_norm.", "attn_q_norm."), ("attn.norm.key_norm.", "attn_k_norm."),
    (".norm.query_norm.", ".q_norm."), (".norm.key_norm.", ".k_norm."), ("norm.scale", "norm.weight"),
)  # fmt: skip
"""Parts of ComfyUI's names, and of the published ones."""


def _published(name: str) -> str:
    if "_mlp." in name or ("individual_token_refiner" in name and ".mlp." in name):
        name = name.replace("mlp.0.", "mlp.fc1.").replace("mlp.2.", "mlp.fc2.")
    return renamed(name, _PUBLISHED)


_BYT5 = "HunyuanVideo 1.5 or HunyuanImage"

_LAYERS = layers("""
    context_embedder norm_out proj_out time_text_embed x_embedder
    transformer_blocks(attn ff ff_context norm1 norm1_context) single_transformer_blocks(attn norm proj_mlp proj_out)
    final_layer guidance_in img_in time_in txt_in vector_in
    double_blocks(img_attn_k_norm img_attn_proj img_attn_q_norm img_attn_qkv img_mlp img_mod
                  txt_attn_k_norm txt_attn_proj txt_attn_q_norm txt_attn_qkv txt_mlp txt_mod)
    single_blocks(k_norm linear1 linear2 modulation q_norm)
""")

_CONVERT = single_file("convert_hunyuan_video_transformer_to_diffusers")


def _convert(tensors: Tensors) -> Tensors:
    """Convert HunyuanVideo of any width; diffusers' converter assumes the published one."""
    width = len(tensors["img_in.proj.weight"])
    others = {name: tensor for name, tensor in tensors.items() if ".linear1." not in name}
    return _CONVERT(others) | split_linear1(tensors, width)


ARCHITECTURE = Architecture(
    class_name="HunyuanVideoTransformer3DModel",
    native=("txt_in.individual_token_refiner.blocks.0.norm1.weight", "vector_in.in_layer.weight", "img_in.proj.weight"),
    diffusers=("context_embedder.token_refiner.refiner_blocks.0.norm1.weight", "x_embedder.proj.weight",
               "time_text_embed.text_embedder.linear_1.weight"),
    config=_config,
    convert=_convert,
    layers=_LAYERS,
    renamed={
        "x_embedder": "img_in", "proj_out": "final_layer.linear",
        "transformer_blocks": "double_blocks", "single_transformer_blocks": "single_blocks",
        "transformer_blocks.0.attn.norm_q": "double_blocks.0.img_attn_q_norm",
        "transformer_blocks.0.ff.net.0.proj": "double_blocks.0.img_mlp.fc1",
        "context_embedder.token_refiner.refiner_blocks": "txt_in.individual_token_refiner.blocks",
        "context_embedder.proj_in": "txt_in.input_embedder",
        "time_text_embed.text_embedder.linear_1": "vector_in.in_layer",
        "time_text_embed.guidance_embedder.linear_1": "guidance_in.mlp.0",
    },
    published=_published,
    foreign={
        "byt5_in.": _BYT5, "time_r_in.": _BYT5, "vision_in.": "HunyuanVideo 1.5",
        "cond_type_": "HunyuanVideo 1.5", "clean_x_embedder.": "HunyuanVideo FramePack",
        "image_projection.": "HunyuanVideo FramePack",
    },
)  # fmt: skip
