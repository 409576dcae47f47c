"""A stored tensor's data as a tensor that reads from the file what is asked of it, whatever the file's format."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checkpoint.dtypes import TORCH_DTYPES
from ..checkpoint.stored_tensor import StoredTensor


@contextmanager
def opened(tensor: StoredTensor) -> Iterator[Tensor]:
    """Map a tensor's data for as long as the context lasts: copy what is needed out of it.

    Yields:
        The numbers, in the tensor's shape. Of a compressed tensor the bytes: ``[rows, bytes]`` if rows are whole
        blocks, else ``[1, bytes]``.
    """
    data = torch.from_numpy(_mapped(tensor)) if tensor.bytes else torch.empty(0, dtype=torch.uint8)
    if tensor.compression is None:
        yield data.view(TORCH_DTYPES[tensor.dtype]).reshape(tensor.shape)
    else:
        rows = tensor.shape[0] if tensor.compression.in_rows(tensor.shape) else 1
        yield data.reshape(rows, -1) if prod(tensor.shape) else data.reshape(rows, 0)


def _mapped(tensor: StoredTensor) -> "np.memmap[Any, np.dtype[np.uint8]]":
    try:
        return np.memmap(tensor.file, np.uint8, mode="c", offset=tensor.offset, shape=(tensor.bytes,))
    except ValueError as error:  # its header was right when it was read
        raise OSError(f"{tensor.file} was cut off while it was used, and lacks {tensor.name}") from error
