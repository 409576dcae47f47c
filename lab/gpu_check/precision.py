"""The cost of TF32: relative errors of float32 products and attention against float64, with and without it.

VAEs have one head, of 384 or 512 features.
"""

import json
import sys

import torch
from torch import Tensor

from lab.gpu_check.timing import device
from parallel_backend.attention.kernels import KERNELS

HEAD_SIZES = (64, 128, 384, 512)
TOKENS, SIDE = 600, 1024
LIMIT = 1e-4
"""Largest error without TF32."""


def main() -> int:
    """Print the errors as JSON, and fail if one without TF32 is above ``LIMIT``."""
    found = {"without TF32": _errors(allow=False), "with TF32": _errors(allow=True)}
    print(json.dumps(found))
    return int(not max(found["without TF32"].values()) <= LIMIT)


def _errors(*, allow: bool) -> dict[str, float]:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allow
    errors = {"product": _product()}
    for size in HEAD_SIZES:
        errors |= {f"head {size}{name}": error for name, error in _attention(size).items()}
    return errors


def _product() -> float:
    left, right = _random(0, SIDE, SIDE), _random(1, SIDE, SIDE)
    return _relative(left @ right, left.double() @ right.double())


def _attention(size: int) -> dict[str, float]:
    query, key, value = (_random(seed, 1, 1, TOKENS, size) for seed in range(3))
    scores = query.double() @ key.double().mT * size**-0.5
    expected = scores.softmax(-1) @ value.double()
    kernel = KERNELS["sdpa"]
    out, lse = kernel.with_lse(query, key, value, None)
    return {
        "": _relative(kernel(query, key, value, None), expected),
        " with lse": max(_relative(out, expected), _relative(lse, scores.logsumexp(-1))),
    }


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device())


def _relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected).norm() / expected.norm())


if __name__ == "__main__":
    sys.exit(main())
