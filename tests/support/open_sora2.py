"""Open-Sora 2.0's weights in the authors' names, written down apart from the converter that is tested."""

import re
from collections.abc import Mapping

import torch
from torch import Tensor

_WHOLE = {
    "x_embedder.latent": "img_in", "x_embedder.condition": "cond_in", "context_embedder": "txt_in",
    "time_text_embed.timestep_embedder.linear_1": "time_in.in_layer",
    "time_text_embed.timestep_embedder.linear_2": "time_in.out_layer",
    "time_text_embed.text_embedder.linear_1": "vector_in.in_layer",
    "time_text_embed.text_embedder.linear_2": "vector_in.out_layer",
    "norm_out.linear": "final_layer.adaLN_modulation.1", "proj_out": "final_layer.linear",
}  # fmt: skip
_DOUBLE = {
    "norm1.linear": "img_mod.lin", "norm1_context.linear": "txt_mod.lin",
    "attn.to_q": "img_attn.q_proj", "attn.to_k": "img_attn.k_proj", "attn.to_v": "img_attn.v_proj",
    "attn.to_out.0": "img_attn.proj",
    "attn.norm_q": "img_attn.norm.query_norm", "attn.norm_k": "img_attn.norm.key_norm",
    "attn.add_q_proj": "txt_attn.q_proj", "attn.add_k_proj": "txt_attn.k_proj", "attn.add_v_proj": "txt_attn.v_proj",
    "attn.to_add_out": "txt_attn.proj", "attn.norm_added_q": "txt_attn.norm.query_norm",
    "attn.norm_added_k": "txt_attn.norm.key_norm",
    "ff.net.0.proj": "img_mlp.0", "ff.net.2": "img_mlp.2", "ff_context.net.0.proj": "txt_mlp.0",
    "ff_context.net.2": "txt_mlp.2",
}  # fmt: skip
_SINGLE = {
    "norm.linear": "modulation.lin", "attn.to_q": "q_proj", "attn.to_k": "k_proj", "proj_out": "linear2",
    "attn.norm_q": "norm.query_norm", "attn.norm_k": "norm.key_norm",
}  # fmt: skip
_BLOCK = re.compile(r"(single_)?transformer_blocks\.(\d+)\.(.+)")


def authors_weights(ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights of our module under the authors' names."""
    theirs = {}
    for name, tensor in ours.items():
        layer, _, kind = name.rpartition(".")
        block = _BLOCK.fullmatch(layer)
        if block is None:
            theirs[f"{_WHOLE[layer]}.{kind}"] = _swapped(tensor) if layer == "norm_out.linear" else tensor
        elif block[1] and block[3] == "attn.to_v":
            mlp = ours[f"single_transformer_blocks.{block[2]}.proj_mlp.{kind}"]
            theirs[f"single_blocks.{block[2]}.v_mlp.{kind}"] = torch.cat([tensor, mlp])
        elif block[1] and block[3] in _SINGLE:
            theirs[_named(f"single_blocks.{block[2]}.{_SINGLE[block[3]]}", kind)] = tensor
        elif not block[1]:
            theirs[_named(f"double_blocks.{block[2]}.{_DOUBLE[block[3]]}", kind)] = tensor
    return theirs


def fused(theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights of the authors' variant ``fused_qkv``: one layer for queries, keys and values."""
    joined = {}
    for name, tensor in theirs.items():
        if ".q_proj." in name:
            layer, kind = name.split(".q_proj.")
            single = layer.startswith("single_blocks")
            parts = [theirs[f"{layer}.{part}.{kind}"] for part in ("q_proj", "k_proj", "v_mlp" if single else "v_proj")]
            joined[f"{layer}.{'linear1' if single else 'qkv'}.{kind}"] = torch.cat(parts)
        elif not re.search(r"\.(k_proj|v_proj|v_mlp)\.", name):
            joined[name] = tensor
    return joined


def _named(layer: str, kind: str) -> str:
    return f"{layer}.{'scale' if layer.endswith('_norm') else kind}"


def _swapped(tensor: Tensor) -> Tensor:
    """Swap shift and scale, whose order differs."""
    return torch.cat(list(reversed(tensor.chunk(2))))
