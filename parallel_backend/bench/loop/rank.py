"""One rank of step loops: ``python -m parallel_backend.bench.loop.rank``, started by ``run``, ended with its parent.

It holds an engine without a supervisor, so that ranks may run in network namespaces of their own.
"""

import argparse
import os
from pathlib import Path

import msgspec

from ...processes import stay_on_own_cores
from ..ranks.rank import COLLECTIVE_PATIENCE, Answer, serve


class LoopTurn(msgspec.Struct, frozen=True, kw_only=True):
    """A step loop on the tensors of a file; ``output`` is where to leave the samples and counts bytes, unless empty."""

    inputs: str
    layout: str
    output: str = ""


class LoopRunner:
    """An engine on this rank."""

    def __init__(self, model: Path, store: Path) -> None:
        self.rank, self.ranks, self.model = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), model
        stay_on_own_cores(self.rank, self.ranks)
        import torch
        import torch.distributed as dist

        from ...engine.engine import Engine

        torch.set_num_threads(1)
        dist.init_process_group("gloo", f"file://{store}", COLLECTIVE_PATIENCE, world_size=self.ranks, rank=self.rank)
        self.engine = Engine(rank=self.rank, world_size=self.ranks, device=torch.device("cpu"))

    def run(self, turn: LoopTurn) -> Answer:
        """All steps."""
        from safetensors.torch import load_file, save_file

        from ...layout.parallel_layout import ParallelLayout
        from ...protocol.messages import Devices, ModelSpec, Sample
        from ...protocol.tensors import describe

        tensors = load_file(turn.inputs)
        devices = Devices(kind="cpu", indices=tuple(range(self.ranks)))
        spec = ModelSpec(
            path=str(self.model), devices=devices, dtype="float32", layout=ParallelLayout.parse(turn.layout)
        )
        message = Sample(model=spec, branches=1, sampler="euler", cfg=1.0, measure=bool(turn.output), timed=True)
        done = self.engine.handle(
            message, describe(tensors), None if self.rank else tensors, report=lambda *_: None, cancelled=lambda: False
        )
        if not done:
            return Answer()
        if turn.output:
            save_file({"samples": done["samples"].contiguous(), "sent": done["sent_bytes"]}, turn.output)
        return Answer(seconds=float(done["seconds"]))


def _runner(options: argparse.Namespace) -> LoopRunner:
    return LoopRunner(Path(options.model), Path(options.store))


if __name__ == "__main__":
    serve(_runner, LoopTurn)
