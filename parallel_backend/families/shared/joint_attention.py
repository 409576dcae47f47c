"""Helpers for families with double-stream and then single-stream blocks: Flux.1, Flux.2, HunyuanVideo."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor

from ...errors import InvalidRequest
from ...interfaces.geometry import AllReduce, Shapes
from ...interfaces.tensor_cuts import ColumnParallel, Cut, RowParallel, Segment, attention_cuts


def all_reduces(
    streams: Sequence[str], width: int, *, double: int, single: int, padded_stream: str
) -> tuple[AllReduce, ...]:
    """Return the sums of tensor parallelism: attention and feed-forward of double blocks, one output of single blocks.

    Args:
        streams: names of the two streams.
        width: features of a token.
        double: number of double blocks.
        single: number of single blocks.
        padded_stream: the stream that needs at least one row in a layer. A rank without its tokens pads it.
    """
    count = 2 * double + single
    return tuple(
        AllReduce(tokens=name, width=width, count=count, min_rows=int(name == padded_stream)) for name in streams
    )


def cuts(heads: Segment, hidden: Segment) -> dict[str, Cut]:
    """Return the cuts of Flux.1's layers. ``hidden`` are the hidden features of a feed-forward."""
    layer_cuts = attention_cuts("transformer_blocks.*.attn", *heads, text=True)
    layer_cuts |= {"transformer_blocks.*.attn.to_add_out": RowParallel((heads,))}
    for name in ("ff", "ff_context"):
        layer_cuts |= {f"transformer_blocks.*.{name}.net.0.proj": ColumnParallel((hidden,))}
        layer_cuts |= {f"transformer_blocks.*.{name}.net.2": RowParallel((hidden,))}
    layer_cuts |= attention_cuts("single_transformer_blocks.*.attn", *heads, out=False)
    layer_cuts |= {"single_transformer_blocks.*.proj_mlp": ColumnParallel((hidden,))}
    return layer_cuts | {"single_transformer_blocks.*.proj_out": RowParallel((heads, hidden))}


def check_guidance(name: str, config: Mapping[str, Any], shapes: Shapes) -> None:
    """Check that guidance is an input if and only if the model has ``guidance_embeds``.

    Raises:
        InvalidRequest: guidance is missing, or the model cannot use it.
    """
    if config["guidance_embeds"] == ("guidance" in shapes):
        return
    if config["guidance_embeds"]:
        reason = "needs guidance, because its config has guidance_embeds: connect FluxGuidance"
    else:
        reason = "takes no guidance, because its config lacks guidance_embeds: remove FluxGuidance"
    raise InvalidRequest(f"this {name} transformer {reason}")


def positions(latent: Tensor, grid: Sequence[int], axes: int) -> Tensor:
    """Return positions ``[rows * columns, axes]`` on the latent's device: axis 1 is the row, axis 2 the column."""
    rows, columns = grid
    ids = torch.zeros(rows, columns, axes, device=latent.device)
    ids[..., 1] = torch.arange(rows, device=latent.device)[:, None]
    ids[..., 2] = torch.arange(columns, device=latent.device)
    return rearrange(ids, "rows columns axes -> (rows columns) axes")


def with_reference(tokens: Tensor, ids: Tensor, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Append the tokens of reference images to tokens ``[B, S, D]``, and their positions to ``[S, axes]``."""
    if "reference" not in inputs:
        return tokens, ids
    tokens = torch.cat([tokens, inputs["reference"].to(tokens.dtype)], dim=1)
    return tokens, torch.cat([ids, inputs["reference_ids"][0].float()])


def rope(embedder: Any, ids: Tensor) -> dict[str, Tensor]:
    """Return rotary tables ``[1, S, D]`` of positions ``[S, axes]``. A state shards them along dim 1."""
    cos, sin = embedder(ids)
    return {"cos": cos[None], "sin": sin[None]}
