"""Milliseconds of each attention kernel at the shapes of published models, with and without log-sum-exp."""

import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from lab.gpu_check.timing import device, seconds
from parallel_backend.attention.flash_package import flash_package
from parallel_backend.attention.kernels import KERNELS, choose
from parallel_backend.errors import InvalidRequest

SHAPES: dict[str, tuple[int, int, int]] = {
    "Flux, 1024 px": (24, 4096 + 512, 128),
    "SD3.5 medium, 1024 px": (24, 4096 + 333, 64),
    "HunyuanVideo, 61 frames of 540p": (24, 16 * 34 * 60 + 256, 128),
    "Wan 14B, 81 frames of 480p": (40, 32760, 128),
    "CogVideoX 5B": (48, 17550 + 226, 64),
}
"""Heads, tokens and head size on one card."""
SMALLER = 32
"""Divides the number of tokens without a GPU, which only shows that the measurement works."""
PARTS = (1, 4, 8)
"""Ranks among which Ulysses would divide the heads."""


def main() -> int:
    """Print the figures as JSON."""
    where = device()
    divisor, refused = 1 if where.type == "cuda" else SMALLER, dict[str, None]()
    found: dict[str, Any] = {
        f"{name}, 1/{part} of the heads": _times(max(1, heads // part), tokens // divisor, size, where, refused)
        for name, (heads, tokens, size) in SHAPES.items()
        for part in PARTS
    }
    print(json.dumps(found | {"auto": _chosen(where), "left out": "; ".join(refused)}))
    return 0


def _chosen(where: torch.device) -> str:
    """Say which kernel ``auto`` is for each head size, and which package of FlashAttention runs here."""
    sizes = sorted({size for _, _, size in SHAPES.values()})
    names = {kernel: name for name, kernel in KERNELS.items()}
    chosen = ", ".join(f"{names[choose('auto', where, torch.bfloat16, [size])]} for {size}" for size in sizes)
    package = flash_package(where) if where.type == "cuda" else None
    return f"{chosen}; " + (
        f"FlashAttention {package.version}" if package else "no package of FlashAttention runs here"
    )


def _times(heads: int, tokens: int, size: int, where: torch.device, refused: dict[str, None]) -> dict[str, float | str]:
    """Return milliseconds by kernel, and add to ``refused`` why one cannot run."""
    times = dict[str, float | str]()
    query, key, value = (torch.randn(1, heads, tokens, size, device=where, dtype=torch.bfloat16) for _ in range(3))
    for name in KERNELS:
        try:
            kernel = choose(name, where, torch.bfloat16, [size])
        except InvalidRequest as refusal:
            refused[f"{name}: {str(refusal).partition(':')[2].partition(';')[0].strip()}"] = None
            continue
        calls: dict[str, Callable[[], object]] = {
            name: partial(kernel, query, key, value, None),
            f"{name} with lse": partial(kernel.with_lse, query, key, value, None),
        }
        times |= {title: _milliseconds(call, where) for title, call in calls.items()}
    return times


def _milliseconds(call: Callable[[], object], where: torch.device) -> float | str:
    try:
        return 1e3 * seconds(call, where)
    except RuntimeError as error:  # what a kernel cannot do is a finding, too
        return f"{type(error).__name__}: {str(error)[:200]}"


if __name__ == "__main__":
    sys.exit(main())
