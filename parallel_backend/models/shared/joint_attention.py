"""What families share whose layers are double-stream and then single-stream blocks: Flux.1, Flux.2, HunyuanVideo."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import InvalidRequest
from ...interfaces.geometry import Shapes, Sum
from ...interfaces.tensor_cuts import Block, ColumnParallel, Cut, RowParallel, attention


def sums(streams: Sequence[str], width: int, *, double: int, single: int, least: str) -> tuple[Sum, ...]:
    """What tensor parallelism sums: attention and feed-forward of double blocks, the one output of single ones.

    ``least`` is the stream of which a layer needs at least one row.
    """
    return tuple(
        Sum(tokens=stream, width=width, count=2 * double + single, least=int(stream == least)) for stream in streams
    )


def cuts(heads: Block, hidden: Block) -> dict[str, Cut]:
    """The cuts of Flux.1's layers; ``hidden`` are the features inside of a feed-forward."""
    found = attention("transformer_blocks.*.attn", *heads, text=True)
    found |= {"transformer_blocks.*.attn.to_add_out": RowParallel((heads,))}
    for name in ("ff", "ff_context"):
        found |= {f"transformer_blocks.*.{name}.net.0.proj": ColumnParallel((hidden,))}
        found |= {f"transformer_blocks.*.{name}.net.2": RowParallel((hidden,))}
    found |= attention("single_transformer_blocks.*.attn", *heads, out=False)
    found |= {"single_transformer_blocks.*.proj_mlp": ColumnParallel((hidden,))}
    return found | {"single_transformer_blocks.*.proj_out": RowParallel((heads, hidden))}


def check_guidance(name: str, config: Mapping[str, Any], shapes: Shapes) -> None:
    """Refuse guidance as an input of a model without ``guidance_embeds``, and none of one with them.

    Raises:
        InvalidRequest: it is so.
    """
    if config["guidance_embeds"] != ("guidance" in shapes):
        wanted = "needs" if config["guidance_embeds"] else "takes no"
        raise InvalidRequest(
            f"this {name} transformer {wanted} guidance: FluxGuidance is for models with guidance_embeds alone"
        )


def positions(latent: Tensor, grid: Sequence[int], axes: int) -> Tensor:
    """``[rows * columns, axes]`` with the row as number 1 and the column as number 2, on the latent's device."""
    rows, columns = grid
    ids = torch.zeros(rows, columns, axes, device=latent.device)
    ids[..., 1] = torch.arange(rows, device=latent.device)[:, None]
    ids[..., 2] = torch.arange(columns, device=latent.device)
    return ids.view(-1, axes)


def with_reference(tokens: Tensor, ids: Tensor, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Tokens ``[B, S, D]`` and their positions ``[S, axes]``, with those of reference images after them."""
    if "reference" not in inputs:
        return tokens, ids
    tokens = torch.cat([tokens, inputs["reference"].to(tokens.dtype)], dim=1)
    return tokens, torch.cat([ids, inputs["reference_ids"][0].float()])


def rope(embedder: Any, ids: Tensor) -> dict[str, Tensor]:
    """Rotary tables ``[1, S, D]`` of positions ``[S, axes]``: with a batch dim, so that they are cut by token."""
    cos, sin = embedder(ids)
    return {"cos": cos[None], "sin": sin[None]}
