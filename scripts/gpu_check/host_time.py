"""Host time against GPU time of a forward at a share of its tokens, with a process group that moves nothing.

This rank does what rank 0 of ``ulysses=N`` does; torch's fake process group stands for the other ranks. If the host's
time is above the GPU's, more GPUs cannot make the step faster.
"""

import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from parallel_backend.bench.ranks.cases import MODELS, BenchModel, Case
from parallel_backend.engine.engine import Engine
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.messages import Forward
from parallel_backend.protocol.model_spec import Devices, ModelSpec
from parallel_backend.protocol.tensors import describe
from parallel_backend.verify.forward.examples import branches, write_checkpoint
from scripts.gpu_check.timing import device, seconds, synchronize

RANKS = (1, 4, 8)
PUBLISHED: dict[str, tuple[int, Mapping[str, Any]]] = {
    "flux": (4096, {"num_attention_heads": 24, "attention_head_dim": 128, "axes_dims_rope": (16, 56, 56)}),
    "wan": (32760, {"num_attention_heads": 40, "ffn_dim": 13824}),
}
"""Tokens and widths of published models; with fewer layers, since all layers are alike."""
_SYNCHRONISING = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


def main() -> int:
    """Print the figures as JSON."""
    found: dict[str, dict[str, float]] = {}
    for family, (tokens, config) in PUBLISHED.items():
        model = replace(MODELS[family], config={**MODELS[family].config, **config})
        for ranks in RANKS:
            found[f"{family}, 1/{ranks} of {tokens} tokens"] = _measure(family, model, tokens, ranks)
    print(json.dumps(found))
    return 0


def _measure(family: str, model: BenchModel, tokens: int, ranks: int) -> dict[str, float]:
    import diffusers

    where = device()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
            torch.manual_seed(0)
            module = getattr(diffusers, model.class_name)(**model.config).to(torch.bfloat16)
            path = write_checkpoint(Path(folder) / "model", module)
            del module
            request = _Request(family, path, tokens, ranks, where)
            return _figures(request, where)
    finally:
        dist.destroy_process_group()


class _Request:
    """One forward on rank 0."""

    def __init__(self, family: str, path: Path, tokens: int, ranks: int, where: torch.device) -> None:
        devices = Devices(kind="cuda" if where.type == "cuda" else "cpu", indices=tuple(range(ranks)))
        layout = ParallelLayout.parse(f"ulysses={ranks}")
        self.message = Forward(
            model=ModelSpec(path=str(path), devices=devices, dtype="bfloat16", layout=layout), branches=1
        )
        inputs = Case(family=family, tokens=tokens, text_tokens=512, branches=1).inputs()
        self.tensors = branches([inputs])
        self.engine = Engine(rank=0, world_size=ranks, device=where)

    def run(self) -> None:
        self.engine.handle(
            self.message, describe(self.tensors), self.tensors, report=lambda *_: None, cancelled=lambda: False
        )


def _figures(request: _Request, where: torch.device) -> dict[str, float]:
    """Return milliseconds of the host and of the GPU, and how often the host starts and waits for work."""
    took = seconds(request.run, where, rounds=5)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if where.type == "cuda" else [])]
    with profile(activities=activities) as profiler:
        request.run()
        synchronize(where)
    events = profiler.events() or []
    on_gpu = sum(event.time_range.elapsed_us() for event in events if "CUDA" in str(event.device_type))
    names = [event.name for event in events]
    return {
        "ms": 1e3 * took,
        "ms on the GPU": on_gpu / 1e3,
        "kernels": float(sum(name.startswith(("cudaLaunchKernel", "cuLaunchKernel")) for name in names)),
        "synchronisations": float(sum(name.startswith(_SYNCHRONISING) for name in names)),
    }


if __name__ == "__main__":
    sys.exit(main())
