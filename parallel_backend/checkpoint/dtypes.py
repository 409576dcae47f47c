"""torch's dtypes of stored weights. Apart from the files' headers, which are read without torch."""

import torch

from .stored_tensor import TORCH_NAMES

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, torch_name) for name, torch_name in TORCH_NAMES.items()}
"""The dtypes that weights may have, by safetensors' names."""

STORED_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}
"""safetensors' names of these dtypes."""

PACKED_NAMES: dict[torch.dtype, str] = {torch.uint8: "U8", torch.int8: "I8", torch.float8_e8m0fnu: "F8_E8M0"}
"""safetensors' names of the dtypes that only compressed weights and their scales have."""
