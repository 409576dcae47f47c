"""Reads single tensors of a model's files in ComfyUI's process."""

import numpy as np
import torch
from torch import Tensor

from ...parallel_backend.checkpoint.dtypes import TORCH_DTYPES
from ...parallel_backend.checkpoint.stored_tensor import StoredTensor


def stored_values(stored: StoredTensor) -> Tensor:
    """Return a tensor of a file that is not compressed."""
    data = np.fromfile(stored.file, np.uint8, count=stored.bytes, offset=stored.offset)
    return torch.from_numpy(data).view(TORCH_DTYPES[stored.dtype]).reshape(stored.shape)
