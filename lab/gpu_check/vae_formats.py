"""A VAE's decode in float32, with TF32, in bfloat16 and with channels last: seconds, memory and error."""

import json
import sys
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from lab.gpu_check.timing import device, seconds
from lab.verify.vae.kinds import KINDS, WIDTH

Size = tuple[int, ...]
CASES: dict[str, tuple[int, Size, Size]] = {"image": (128, (128, 128), (8, 8)), "wan21": (128, (3, 60, 104), (2, 4, 4))}
"""By the kind of VAE: the width that gives it the published channels, and sizes of the latent on a GPU and a CPU."""
FORMATS = {"float32": (torch.float32, False, False), "TF32": (torch.float32, True, False),
           "bfloat16": (torch.bfloat16, False, False), "float32, channels last": (torch.float32, False, True),
           "bfloat16, channels last": (torch.bfloat16, False, True)}  # fmt: skip
"""By name: the dtype, whether TF32 is allowed, and whether channels come last in memory."""


def main() -> int:
    """Print the figures as JSON."""
    print(json.dumps({kind: _measure(kind, *case) for kind, case in CASES.items()}))
    return 0


def _measure(kind: str, width: int, on_gpu: Size, on_cpu: Size) -> dict[str, dict[str, float]]:
    where = device()
    module = KINDS[kind].module(width if where.type == "cuda" else WIDTH)
    size = on_gpu if where.type == "cuda" else on_cpu
    channels = module.config.get("latent_channels") or module.config.z_dim
    latent = torch.randn(1, channels, *size, generator=torch.Generator().manual_seed(0)).to(where)
    figures: dict[str, dict[str, float]] = {}
    expected: Tensor | None = None
    for name, (dtype, tf32, last) in FORMATS.items():
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
        decode = _decoder(deepcopy(module).to(where, dtype), latent.to(dtype), last=last)
        pixels = decode()
        expected = pixels if expected is None else expected
        difference = float((pixels.float() - expected).abs().max())
        figures[name] = _figures(decode, where) | {"largest difference": difference}
    return figures


def _figures(decode: Callable[[], Tensor], where: torch.device) -> dict[str, float]:
    if where.type != "cuda":
        return {"seconds": seconds(decode, where, rounds=3)}
    torch.cuda.reset_peak_memory_stats(where)
    before = torch.cuda.memory_allocated(where)
    took = seconds(decode, where, rounds=3)
    return {"seconds": took, "GB": (torch.cuda.max_memory_allocated(where) - before) / 1e9}


def _decoder(module: Any, latent: Tensor, *, last: bool) -> Callable[[], Tensor]:
    """Return a function that decodes the latent, with weights and latent in channels-last memory if ``last``."""
    if last:
        wanted = {4: torch.channels_last, 5: torch.channels_last_3d}[latent.ndim]
        latent = latent.contiguous(memory_format=wanted)
        for parameter in module.parameters():
            if parameter.ndim == latent.ndim:
                parameter.data = parameter.data.contiguous(memory_format=wanted)

    @torch.no_grad()
    def decode() -> Tensor:
        pixels: Tensor = module.decode(latent).sample
        return pixels

    return decode


if __name__ == "__main__":
    sys.exit(main())
