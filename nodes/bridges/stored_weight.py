"""The value of a single weight, where ComfyUI decides something by it."""

import numpy as np
import torch
from torch import Tensor

from ...parallel_backend.checkpoint.checkpoint import Checkpoint
from ...parallel_backend.checkpoint.dtypes import TORCH_DTYPES
from ...parallel_backend.checkpoint.weight_headers import read_files


def stored_weight(checkpoint: Checkpoint, name: str) -> Tensor | None:
    """Return a weight of the transformer by its name in the files; None if it is not there or compressed.

    Reads nothing else of them but headers.
    """
    stored = checkpoint.stored("transformer")
    found = read_files(stored.files).tensors.get(stored.prefix + name)
    if found is None or found.dtype not in TORCH_DTYPES:
        return None
    data = np.fromfile(found.file, np.uint8, count=found.bytes, offset=found.offset)
    return torch.from_numpy(data).view(TORCH_DTYPES[found.dtype]).reshape(found.shape)
