"""One rank of ``overlap``: ``python -m lab.gpu_check.several.overlap_rank``."""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from lab.bench.ranks.rank import Result, serve, start
from lab.gpu_check.several.exchanges_rank import meshes
from lab.gpu_check.several.overlap_work import ON_CPU, ON_GPU, WORKS
from lab.gpu_check.timing import synchronize
from parallel_backend.distributed.collectives import agree, gather_numbers
from parallel_backend.distributed.mesh import Axis
from parallel_backend.layout.parallel_layout import ParallelLayout

WARMUP, ROUNDS = 3, 15


class WorkRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for measurements.

    Attributes:
        name: one of ``WORKS``.
        output: JSON file for the seconds by round, of both, of the computation and of the exchange.
    """

    name: str
    output: str


class Overlapper:
    """This rank."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = start(options, threads=1, eager=True)
        self.meshes = meshes(self.device)

    def run(self, request: WorkRequest) -> Result:
        """Measure; the kinds of work take turns in each round."""
        layout, make = WORKS[request.name]
        made = self.meshes.get(ParallelLayout.parse(layout.format(ranks=self.ranks)))
        assert made is not None
        work = make(made, self.device, ON_GPU if self.device.type == "cuda" else ON_CPU)
        seconds: dict[str, list[float]] = {}
        with torch.inference_mode():
            for number in range(WARMUP + ROUNDS):
                for kind in (work.both, work.compute, work.exchange):
                    took = _seconds(kind, made.all_ranks, self.device)
                    seconds.setdefault(kind.__name__, []).extend([took] if number >= WARMUP else [])
        if self.rank == 0:
            figures = {"share": work.share, "busy": work.busy, "seconds": seconds}
            Path(request.output).write_text(json.dumps(figures), encoding="utf-8")
        return Result(seconds=statistics.median(seconds["both"]))


def _seconds(work: Callable[[], None], whole: Axis, device: torch.device) -> float:
    """Return the seconds until the last rank is done."""
    synchronize(device)
    agree(0, whole)
    started = time.perf_counter()
    work()
    synchronize(device)
    took = round(1e9 * (time.perf_counter() - started))
    return max(nanoseconds for (nanoseconds,) in gather_numbers([took], whole)) / 1e9


if __name__ == "__main__":
    serve(Overlapper, WorkRequest)
