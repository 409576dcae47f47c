"""One rank of ``exchanges``: ``python -m lab.gpu_check.several.exchanges_rank``.

It makes a layout's mesh and checks every kind of exchange on every axis: on a GPU over NCCL, and over gloo, which
works in the same groups on tensors in the CPU's memory.
"""

import argparse
import os
import time
from collections.abc import Iterator
from datetime import timedelta

import msgspec
import torch

from lab.bench.ranks.rank import Result, serve, start
from lab.gpu_check.several.exchange_kinds import KINDS
from parallel_backend.distributed.mesh import Axis, RankMesh
from parallel_backend.distributed.mesh_cache import MeshCache
from parallel_backend.layout.parallel_layout import ParallelLayout

TIMEOUT = timedelta(seconds=60)
"""Deadline of each exchange."""


class WrongValue(Exception):
    """A rank has received other values than were sent."""


class LayoutRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to check a layout.

    Attributes:
        layout: the layout.
    """

    layout: str


class Exchanger:
    """This rank."""

    def __init__(self, options: argparse.Namespace) -> None:
        device = start(options, threads=1, eager=True)
        self.devices = list(dict.fromkeys([device, torch.device("cpu")]))
        self.meshes = meshes(device)

    def run(self, request: LayoutRequest) -> Result:
        """Check every exchange of a layout.

        Raises:
            WrongValue: something else arrived than was sent.
        """
        started = time.perf_counter()
        made = self.meshes.get(ParallelLayout.parse(request.layout))
        for axis in axes(made) if made else ():
            for device in self.devices:
                check(axis, device)
        return Result(seconds=time.perf_counter() - started)


def meshes(device: torch.device) -> MeshCache:
    """Return this rank's meshes, which no model uses."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return MeshCache(rank, ranks, device, timeout=TIMEOUT, in_use=list)


def axes(made: RankMesh) -> Iterator[Axis]:
    """Yield the axes with more than one rank; the same on all ranks of the mesh."""
    more = [made.sequence, *(made.pipe_links or ()), made.weights_axis, made.ring_async, made.all_ranks]
    yield from (axis for axis in (*made.axes.values(), *more) if axis and axis.size > 1)


def check(axis: Axis, device: torch.device) -> None:
    """Check every kind of exchange on an axis.

    Raises:
        WrongValue: something else arrived than was sent.
    """
    for kind in KINDS:
        wrong: list[str] = []
        try:
            kind(axis, device, wrong)
        except Exception as error:  # whatever an exchange raises, the report has to name it
            wrong.append(f"{type(error).__name__}: {error}")
        if wrong:
            where = f"{kind.__name__} on {axis.name} of ranks {axis.ranks} on {device.type}"
            raise WrongValue(f"{where}: {'; '.join(wrong)}")


if __name__ == "__main__":
    serve(Exchanger, LayoutRequest)
