"""One rank of ``bench projections``: ``python -m lab.bench.projections.rank``, started by ``command``."""

import argparse
from time import perf_counter
from typing import TYPE_CHECKING

import msgspec

from ..ranks.rank import Result, serve, start

if TYPE_CHECKING:
    from .layer import Layer

TOLERANCE = 1e-4


class ProjectionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to compute an attention layer once.

    Attributes:
        tokens: of all ranks.
        heads: of 128 channels each.
        way: a name in ``Layer.ways``.
    """

    tokens: int
    heads: int
    way: str


class ProjectionRunner:
    """This rank's layer."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.device = start(options, threads=1)
        self._layers: dict[tuple[int, int], Layer] = {}
        self._checked: set[ProjectionRequest] = set()

    def run(self, request: ProjectionRequest) -> Result:
        """Compute the layer. The first result of each way is compared with the layer on one rank."""
        import torch
        import torch.distributed as dist

        from parallel_backend.distributed.rank_speeds import synchronize

        from .layer import Layer

        key = request.tokens, request.heads
        if key not in self._layers:
            self._layers = {key: Layer(*key, self.device)}
        layer = self._layers[key]
        with torch.inference_mode():
            dist.barrier()
            synchronize(self.device)
            begin = perf_counter()
            result = layer.ways[request.way]()
            synchronize(self.device)
            seconds = perf_counter() - begin
            if request not in self._checked:
                difference = float((result - layer.alone()).abs().max())
                if difference > TOLERANCE:
                    return Result(error=f"{request.way} differs from one rank by {difference:.1e}")
                self._checked.add(request)
        return Result(seconds=seconds)


if __name__ == "__main__":
    serve(ProjectionRunner, ProjectionRequest)
