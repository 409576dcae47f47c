"""torch's dtypes of stored weights. Apart from the files' headers, which are read without torch."""

import torch

from .stored_tensor import TORCH_NAMES

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, torch_name) for name, torch_name in TORCH_NAMES.items()}
"""The dtypes that weights may have, by safetensors' names."""

STORED_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}
"""safetensors' names of these dtypes."""

PACKED_NAMES: dict[torch.dtype, str] = {
    dtype: name
    for name, torch_name in {"U8": "uint8", "I8": "int8", "F8_E8M0": "float8_e8m0fnu"}.items()
    if (dtype := getattr(torch, torch_name, None)) is not None
}
"""safetensors' names of the dtypes that only compressed weights and their scales have. Older torch lacks one."""
