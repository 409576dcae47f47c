"""Host time against GPU time of a forward at a share of its tokens, with a process group that moves nothing.

This rank does what rank 0 of ``ulysses=N`` does; torch's fake process group stands for the other ranks. If the host's
time is above the GPU's, more GPUs cannot make the step faster.
"""

import json
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore

from lab.bench.ranks.cases import MODELS, BenchModel, Case
from lab.gpu_check.timing import device, seconds, synchronize
from parallel_backend.engine.engine import Engine
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.messages import Forward
from parallel_backend.protocol.model_spec import Devices, ModelSpec
from parallel_backend.protocol.tensors import describe
from parallel_backend.verify.examples import branches, write_checkpoint

RANKS = (1, 4, 8)
PUBLISHED: dict[str, tuple[int, Mapping[str, Any]]] = {
    "flux": (4096, {"num_attention_heads": 24, "attention_head_dim": 128, "axes_dims_rope": (16, 56, 56)}),
    "wan": (32760, {"num_attention_heads": 40, "ffn_dim": 13824}),
}
"""Tokens and widths of published models; with fewer layers, since all layers are alike."""
ON_CPU: dict[str, tuple[int, Mapping[str, Any]]] = {"flux": (256, {}), "wan": (256, {})}
"""Without a GPU: the widths of ``MODELS``. It shows that the measurement works and no more."""
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "hipLaunchKernel", "hipExtModuleLaunchKernel")
_SYNCHRONISING = ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize")
"""Ends of the names of what CUDA's and HIP's runtimes do."""


def main() -> int:
    """Print the figures as JSON."""
    found: dict[str, dict[str, float]] = {}
    for family, (tokens, config) in (PUBLISHED if device().type == "cuda" else ON_CPU).items():
        model = replace(MODELS[family], config={**MODELS[family].config, **config})
        with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
            path = _write(model, Path(folder) / "model")
            for ranks in RANKS:
                found[f"{family}, 1/{ranks} of {tokens} tokens"] = _measure(family, path, tokens, ranks)
    print(json.dumps(found))
    return 0


def _write(model: BenchModel, path: Path) -> Path:
    """Write a checkpoint in bfloat16."""
    import diffusers

    torch.manual_seed(0)
    return write_checkpoint(path, getattr(diffusers, model.class_name)(**model.config).to(torch.bfloat16))


def _measure(family: str, path: Path, tokens: int, ranks: int) -> dict[str, float]:
    where = device()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        return _figures(_Request(family, path, tokens, ranks, where), where)
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
    return {"ms": 1e3 * took} | (counts(profiler.events() or []) if where.type == "cuda" else {})


def counts(events: Iterable[Any]) -> dict[str, float]:
    """Return the profile of one call and of one wait for the device."""
    calls = [event.name for event in events if "CPU" in str(event.device_type)]
    work = [event for event in events if "CPU" not in str(event.device_type)]
    # Named ranges of the host show on the GPU's side a second time.
    busy = sum(event.time_range.elapsed_us() for event in work if not getattr(event, "is_user_annotation", False))
    waits = sum(name.endswith(_SYNCHRONISING) for name in calls)
    return {
        "ms on the GPU": busy / 1e3,
        "kernels": float(sum(name.startswith(_LAUNCHES) for name in calls)),
        "synchronisations": float(max(0, waits - 1)),  # without the wait that ends the profile
    }


if __name__ == "__main__":
    sys.exit(main())
