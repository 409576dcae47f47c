"""Predicts the bytes that each rank sends in a decode or encode, from the tensor shapes recorded on a single rank.

Between layers a rank sends

- the rows of its block that are in other ranks' halos (``rows.Halo``),
- mean and mean square of each group of each ``GroupNorm``, in float64, to every other rank (``norms``),
- in ring attention over a frame, every rank's keys and values except the next rank's: after the last hop they need not
  be passed on (``RingAttention``).

In addition, rank 0 sends the input's rows and, where bytes are counted, a flag after each progress unit but the last,
which says whether to continue. The other ranks send rank 0 their rows of the output. No feature map is gathered.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from ...layout.partition import Partition
from .layers import is_temporal, layers_to_replace, row_window
from .rows import ROW_DIM, halo_ranges, scale_partition
from .windows import RowWindow

_FLAG_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class LayerCall:
    """One call, on whole images, of a layer that may need rows of other ranks.

    Attributes:
        layer: the layer.
        shapes: the shapes of the tensors that it was given.
        itemsize: bytes per value.
    """

    layer: nn.Module
    shapes: tuple[tuple[int, ...], ...]
    itemsize: int


@contextmanager
def record_calls(module: nn.Module) -> Iterator[list[LayerCall]]:
    """Record the calls of layers that may need other ranks' rows, while the module processes whole images."""
    calls: list[LayerCall] = []

    def record(layer: nn.Module, args: tuple[Any, ...]) -> None:
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        calls.append(LayerCall(layer=layer, shapes=shapes, itemsize=tensors[0].itemsize))

    with ExitStack() as stack:
        for _, layer in layers_to_replace(module):
            stack.callback(layer.register_forward_pre_hook(record).remove)
        yield calls


def bytes_sent(
    calls: Sequence[LayerCall],
    latent_rows: Partition,
    rank: int,
    whole_input: Tensor,
    output: Tensor,
    itemsize: int,
    progress_units: int,
) -> int:
    """Return the bytes that one rank sends.

    Args:
        rank: index of the rank on the split's axis.
        whole_input: the latent (decode) or pixels (encode) that rank 0 scatters.
        output: the whole result.
        itemsize: bytes per value of the VAE's dtype, in which the other ranks send their rows of the result.
        progress_units: the number of progress units. Rank 0 sends every other rank one flag after each but the last.
    """
    between_layers = sum(_call_bytes(call, latent_rows, rank) for call in calls)
    if rank:
        return between_layers + output.numel() * itemsize * latent_rows.sizes[rank] // latent_rows.total
    others = latent_rows.total - latent_rows.sizes[0]
    flags = (progress_units - 1) * (len(latent_rows.sizes) - 1) * _FLAG_BYTES
    return between_layers + whole_input.nbytes * others // latent_rows.total + flags


def _call_bytes(call: LayerCall, latent_rows: Partition, rank: int) -> int:
    """Return the bytes that a rank sends in one call of a layer."""
    window, other_ranks = row_window(call.layer), len(latent_rows.sizes) - 1
    if window is not None:
        return sum(_halo_values(shape, window, latent_rows, rank) for shape in call.shapes) * call.itemsize
    shape = call.shapes[0]
    if isinstance(call.layer, nn.GroupNorm):
        return other_ranks * 2 * shape[0] * call.layer.num_groups * torch.double.itemsize
    # shape: [B, C, (T,) H, W]; one token per position
    keys_per_row = prod(shape) // shape[1] // shape[ROW_DIM] * _key_width(call.layer)
    partition = scale_partition(latent_rows, shape[ROW_DIM])
    passed_rows = partition.total - partition.sizes[(rank + 1) % len(partition.sizes)]
    return 2 * keys_per_row * passed_rows * call.itemsize  # 2: keys and values


def _halo_values(shape: Sequence[int], window: RowWindow, latent_rows: Partition, rank: int) -> int:
    """Return how many values of a tensor a rank sends to all other ranks' halos."""
    partition, row_values = scale_partition(latent_rows, shape[ROW_DIM]), prod(shape) // shape[ROW_DIM]
    readers = [reader for reader in range(len(latent_rows.sizes)) if reader != rank]
    ranges = [halo_ranges(partition, rank, reader, window.halo_above, window.halo_below) for reader in readers]
    return row_values * sum(count for halo in ranges for _, count in halo)


def _key_width(layer: Any) -> int:
    """Return the width of a token's key (heads x head_dim), summed over the layer's spatial attentions."""
    kind = type(layer).__name__
    if kind == "HunyuanVideoMidBlock3D":
        return sum(_key_width(attention) for attention in layer.attentions if attention is not None)
    if kind == "Attention":
        return 0 if is_temporal(layer) else int(layer.to_k.out_features)
    return int(layer.to_qkv.out_channels) // 3
