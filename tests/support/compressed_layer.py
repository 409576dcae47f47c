"""A linear layer whose weight is compressed in a file."""

from pathlib import Path

import torch
from torch import Tensor, nn

from parallel_backend.checkpoint.weight_headers import read_file, weights_under
from parallel_backend.loading.compressed_linear import CompressedLinear
from parallel_backend.loading.scales import read_scale
from parallel_backend.loading.stored_bytes import opened

from . import compressed

ROWS, COLUMNS = 64, 256


def compressed_layer(folder: Path, name: str, *, bias: bool = True) -> tuple[CompressedLinear, Tensor]:
    """Return a layer ``[ROWS, COLUMNS]`` on the CPU, and its decoded weight.

    Args:
        folder: where its file goes.
        name: of the format, as in ``compressed.FORMATS`` and ``compressed.GGUF_TYPES``.
        bias: whether it has one.
    """
    torch.manual_seed(0)
    plain = {"a.weight": torch.randn(ROWS, COLUMNS)}
    if name in compressed.GGUF_TYPES:
        path = folder / "a.gguf"
        decoded = compressed.write_gguf(path, plain, name)
    else:
        path = folder / "a.safetensors"
        decoded = compressed.write_described(path, plain, name)
    stored = weights_under("", read_file(path))["a.weight"]
    assert stored.compression is not None
    linear = nn.Linear(COLUMNS, ROWS, bias=bias, device="meta")
    made = CompressedLinear(linear, stored.compression).to_empty(device="cpu")
    with opened(stored) as data:
        made.packed.data = data.clone()
    for scale in stored.compression.scales:
        getattr(made, scale).data = read_scale(stored, scale)
    if bias:
        made.bias.data = torch.randn(ROWS)
    return made.requires_grad_(False), decoded["a.weight"]
