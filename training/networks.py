"""The networks of the "shapes" checkpoint, and a cheap but exact treatment of Wan's text padding for training.

Wan attends to 512 text positions without a mask, and all positions after the prompt hold zeros. Their keys and values
are identical, so a single one with ``log(count)`` added to its attention logit gives the same softmax at a fraction of
the cost.
"""

import math
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttention, WanAttnProcessor
from torch import Tensor
from transformers import UMT5Config, UMT5EncoderModel

from training.captions import vocabulary

TEXT_POSITIONS = 512
TEXT_DIM = 64
NEIGHBOURS = (17, 1, 18, 2)
"""T5's buckets of the relative positions 1, -1, 2 and -2, one per head."""


def new_text_encoder() -> UMT5EncoderModel:
    """Create the text encoder: two layers over about forty words."""
    config = UMT5Config(
        vocab_size=len(vocabulary()), d_model=TEXT_DIM, d_kv=16, d_ff=128, num_layers=2, num_heads=4, dropout_rate=0.0
    )
    encoder = UMT5EncoderModel(config)
    see_neighbours(encoder)
    return encoder


@torch.no_grad()
def see_neighbours(encoder: UMT5EncoderModel) -> None:
    """Initialize each self-attention head to attend to one neighbour of a word; see ``NEIGHBOURS``.

    With a random initialization the encoder ignores word order for thousands of steps, so that "a red circle on a blue
    background" means the same as "a blue circle on a red background".
    """
    for block in encoder.encoder.block:
        bias = block.layer[0].SelfAttention.relative_attention_bias.weight
        bias.zero_()
        for head, bucket in enumerate(NEIGHBOURS):
            bias[bucket, head] = 6.0


def new_transformer() -> WanTransformer3DModel:
    """Create Wan 2.1's text-to-video network with 4.0 M parameters instead of 1.3 G; a token covers 16 x 16 pixels."""
    transformer = WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=4,
        attention_head_dim=48,
        text_dim=TEXT_DIM,
        freq_dim=256,
        ffn_dim=768,
        num_layers=6,
        cross_attn_norm=True,
    )
    ignore_padding(transformer)
    see_frames(transformer)
    return transformer


@torch.no_grad()
def see_frames(transformer: WanTransformer3DModel) -> None:
    """Initialize two heads of the first block to attend to a token's own position in the previous and the next frame.

    Rotary positions are relative, so a token can only tell its frame by what a head does not find before the first and
    after the last frame. These heads provide that from the start.
    """
    attention = transformer.blocks[0].attn1
    size = attention.inner_dim // attention.heads
    for head, frames in ((2, 1), (0, -1)):
        attention.to_q.weight[head * size : (head + 1) * size] = 0.0
        attention.to_q.bias[head * size : (head + 1) * size] = 0.0
        for channel, angle in _fastest_pairs(size, frames):
            pair = torch.arange(2) + head * size + channel
            for projection, norm, phase in (
                (attention.to_q, attention.norm_q, 0.0),
                (attention.to_k, attention.norm_k, angle),
            ):
                projection.weight[pair] = 0.0
                projection.bias[pair] = 2.5 * torch.tensor([math.cos(phase), math.sin(phase)])
                norm.weight[pair] = 3.5


def _fastest_pairs(size: int, frames: int) -> list[tuple[int, float]]:
    """Return, for each of Wan's three rotary axes (frames, rows, columns), the two fastest pairs of channels: the first
    channel, and the angle by which the pair turns over ``frames`` frames, which is 0 for rows and columns.

    Args:
        size: channels of a head.
        frames: offset of the attended frame.
    """
    rows = 2 * (size // 6)
    starts = (0, size - 2 * rows, size - rows)
    widths = (size - 2 * rows, rows, rows)
    return [
        (start + 2 * pair, 10000 ** (-2 * pair / width) * (frames if axis == 0 else 0))
        for axis, (start, width) in enumerate(zip(starts, widths, strict=True))
        for pair in (0, 1)
    ]


@torch.no_grad()
def ignore_padding(transformer: WanTransformer3DModel) -> None:
    """Initialize cross-attention so that 500 padding positions together weigh less than one word.

    Otherwise the words share two percent of the attention, and a small network takes very long to find them. Without
    other biases, the key of a padding position is the key bias alone, which the norm scales to full size. The bias is
    set to oppose a component that all queries share, the first channel of each head.
    """
    embedder = transformer.condition_embedder.text_embedder
    embedder.linear_1.bias.zero_()
    embedder.linear_2.bias.zero_()
    for block in transformer.blocks:
        attention = block.attn2
        first = slice(None, None, attention.inner_dim // attention.heads)
        for projection, common in ((attention.to_q, 2.0), (attention.to_k, -0.1), (attention.to_v, 0.0)):
            projection.bias.zero_()
            projection.bias[first] = common
        attention.norm_q.weight[first] = 2.5


class OnePadAttention(WanAttnProcessor):  # type: ignore[misc]
    """Cross-attention with a ``bias`` ``[B, 1, 1, K]`` by which one padding position counts for many."""

    def __init__(self) -> None:
        super().__init__()
        self.bias: Tensor | None = None

    def __call__(
        self,
        attn: WanAttention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: Any = None,
    ) -> Tensor:
        """Run the stock computation with the bias as the mask."""
        output: Tensor = super().__call__(attn, hidden_states, encoder_hidden_states, self.bias, rotary_emb)
        return output


def share_padding(transformer: WanTransformer3DModel) -> OnePadAttention:
    """Set one :class:`OnePadAttention` in all cross-attentions of this instance and return it."""
    processor = OnePadAttention()
    for block in transformer.blocks:
        block.attn2.set_processor(processor)
    return processor


def encode_text(encoder: UMT5EncoderModel, ids: Tensor, mask: Tensor) -> Tensor:
    """Return embeddings ``[B, L, D]`` that are zero after each prompt's end."""
    hidden: Tensor = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
    return hidden * mask[..., None]


def padding_bias(mask: Tensor) -> Tensor:
    """Return the logit bias ``[B, 1, 1, L]`` by which the first padding position stands for all ``512 - length``.

    Args:
        mask: ``[B, L]``, 1 on a prompt's tokens; every row ends with at least one 0.
    """
    lengths = mask.sum(1)
    position = torch.arange(mask.shape[1], device=mask.device)[None]
    bias = torch.zeros(mask.shape, device=mask.device)
    bias[position > lengths[:, None]] = -math.inf
    first = position == lengths[:, None]
    counts = (TEXT_POSITIONS - lengths).float().log()
    bias = torch.where(first, counts[:, None], bias)
    return bias[:, None, None]
