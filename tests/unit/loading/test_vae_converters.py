"""Converters of VAEs, which move rows and nothing else."""

import torch

from parallel_backend.checkpoint.architectures import architecture_of
from parallel_backend.loading.row_map import Rows, converted


def test_mochis_fused_attention_is_split_by_rows():
    fused = "encoder.layers.4.layers.1.attn_block.attn.qkv.weight"
    shapes = {fused: (96, 32), "encoder.layers.4.layers.0.weight": (32, 32, 1, 2, 2)}
    rows = converted(shapes, architecture_of("AutoencoderKLMochi").to_diffusers)
    start = "encoder.down_blocks.0"
    assert rows == {
        f"{start}.conv_in.conv.weight": Rows(
            source="encoder.layers.4.layers.0.weight", spans=(slice(0, 32),), count=32
        ),
        **{
            f"{start}.attentions.0.{layer}.weight": Rows(source=fused, spans=(slice(32 * i, 32 * i + 32),), count=32)
            for i, layer in enumerate(("to_q", "to_k", "to_v"))
        },
    }


def test_other_vaes_are_renamed():
    tensors = {"encoder.conv1.weight": torch.zeros(1), "decoder.head.0.gamma": torch.ones(1)}
    renamed = architecture_of("AutoencoderKLWan").to_diffusers(tensors)
    assert renamed.keys() == {"encoder.conv_in.weight", "decoder.norm_out.gamma"}
    assert all(any(tensor is each for each in tensors.values()) for tensor in renamed.values())
