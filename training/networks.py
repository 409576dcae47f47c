"""The networks of the "shapes" checkpoint and the cheap exact form of Wan's padded text for training.

Wan attends to 512 text positions without a mask, and every position beyond the prompt holds zeros.
Keys and values of all those positions are alike, so one of them with ``log(count)`` added to its
attention logit gives the same softmax at a fraction of the cost.
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
"""T5's buckets of the relative positions 1, -1, 2 and -2, one a head."""


def new_text_encoder() -> UMT5EncoderModel:
    """Two layers over some forty words."""
    config = UMT5Config(
        vocab_size=len(vocabulary()), d_model=TEXT_DIM, d_kv=16, d_ff=128, num_layers=2, num_heads=4, dropout_rate=0.0
    )
    encoder = UMT5EncoderModel(config)
    see_neighbours(encoder)
    return encoder


@torch.no_grad()
def see_neighbours(encoder: UMT5EncoderModel) -> None:
    """Start each head of self-attention at one neighbour of a word: the next, the last, the one after, the one before.

    From a random start the encoder stays blind to order for thousands of steps, and "a red circle on a blue
    background" means what "a blue circle on a red background" means.
    """
    for block in encoder.encoder.block:
        bias = block.layer[0].SelfAttention.relative_attention_bias.weight
        bias.zero_()
        for head, bucket in enumerate(NEIGHBOURS):
            bias[bucket, head] = 6.0


def new_transformer() -> WanTransformer3DModel:
    """Wan 2.1's text-to-video network, 4.0 M parameters instead of 1.3 G; a token is 16 x 16 pixels."""
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
    overlook_padding(transformer)
    see_frames(transformer)
    return transformer


@torch.no_grad()
def see_frames(transformer: WanTransformer3DModel) -> None:
    """Start two heads of the first block at a token's own place in the last and in the next frame.

    Rotary positions are relative: a token finds out which frame it is in by what a head cannot see at
    the first and the last, and these heads show it that from the start.
    """
    attention = transformer.blocks[0].attn1
    size = attention.inner_dim // attention.heads
    for head, frames in ((2, 1), (0, -1)):
        attention.to_q.weight[head * size : (head + 1) * size] = 0.0
        attention.to_q.bias[head * size : (head + 1) * size] = 0.0
        for channel, turn in _fastest_pairs(size, frames):
            pair = torch.arange(2) + head * size + channel
            for projection, norm, phase in (
                (attention.to_q, attention.norm_q, 0.0),
                (attention.to_k, attention.norm_k, turn),
            ):
                projection.weight[pair] = 0.0
                projection.bias[pair] = 2.5 * torch.tensor([math.cos(phase), math.sin(phase)])
                norm.weight[pair] = 3.5


def _fastest_pairs(size: int, frames: int) -> list[tuple[int, float]]:
    """For Wan's three rotary axes (frames, rows, columns): the first channels of the two fastest pairs and the
    angle by which each turns on the way to the place looked at."""
    rows = 2 * (size // 6)
    starts = (0, size - 2 * rows, size - rows)
    widths = (size - 2 * rows, rows, rows)
    return [
        (start + 2 * pair, 10000 ** (-2 * pair / width) * (frames if axis == 0 else 0))
        for axis, (start, width) in enumerate(zip(starts, widths, strict=True))
        for pair in (0, 1)
    ]


@torch.no_grad()
def overlook_padding(transformer: WanTransformer3DModel) -> None:
    """Start cross-attention so that 500 blank positions together weigh less than one word.

    Else the words share two percent of the attention, and a small network takes very long to find
    them. Without biases a blank's key is the key bias alone, which the norm blows up to full size;
    it points against a part that all queries have in common, the first channel of each head.
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
    """Cross-attention whose ``bias`` ``[B, 1, 1, K]`` lets one padding position count for many."""

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
        """The stock computation with our bias for a mask."""
        output: Tensor = super().__call__(attn, hidden_states, encoder_hidden_states, self.bias, rotary_emb)
        return output


def share_padding(transformer: WanTransformer3DModel) -> OnePadAttention:
    """Give every cross-attention of this instance one :class:`OnePadAttention` and return it."""
    processor = OnePadAttention()
    for block in transformer.blocks:
        block.attn2.set_processor(processor)
    return processor


def encode_text(encoder: UMT5EncoderModel, ids: Tensor, mask: Tensor) -> Tensor:
    """Embeddings ``[B, L, D]``, zero beyond each prompt."""
    hidden: Tensor = encoder(input_ids=ids, attention_mask=mask).last_hidden_state
    return hidden * mask[..., None]


def padding_bias(mask: Tensor) -> Tensor:
    """Logit bias ``[B, 1, 1, L]`` with which the first padding position stands for all ``512 - length``.

    Args:
        mask: ``[B, L]``, 1 on a prompt's tokens; every row ends with at least one 0.
    """
    lengths = mask.sum(1)
    place = torch.arange(mask.shape[1], device=mask.device)[None]
    bias = torch.zeros(mask.shape, device=mask.device)
    bias[place > lengths[:, None]] = -math.inf
    first = place == lengths[:, None]
    counts = (TEXT_POSITIONS - lengths).float().log()
    bias = torch.where(first, counts[:, None], bias)
    return bias[:, None, None]
