"""One rank of step loops: ``python -m parallel_backend.bench.loop.rank``, started by ``loop.run``.

The process holds an engine without a supervisor, so that each rank may run in a network namespace of its own. It ends
with its parent.
"""

import argparse
import os
from pathlib import Path

import msgspec

from ...processes import pin_to_core_share
from ..ranks.rank import COLLECTIVE_PATIENCE, Result, serve


class LoopRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request for one step loop.

    Attributes:
        inputs: safetensors file of the loop's tensors.
        layout: layout to run it in.
        output: safetensors file for the samples and the bytes sent by rank; if empty, neither is saved.
    """

    inputs: str
    layout: str
    output: str = ""


class LoopRunner:
    """This rank's engine."""

    def __init__(self, model: Path, store: Path) -> None:
        self.rank, self.ranks, self.model = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), model
        pin_to_core_share(self.rank, self.ranks)
        import torch
        import torch.distributed as dist

        from ...engine.engine import Engine

        torch.set_num_threads(1)
        dist.init_process_group("gloo", f"file://{store}", COLLECTIVE_PATIENCE, world_size=self.ranks, rank=self.rank)
        self.engine = Engine(rank=self.rank, world_size=self.ranks, device=torch.device("cpu"))

    def run(self, request: LoopRequest) -> Result:
        """Run all steps."""
        from safetensors.torch import load_file, save_file

        from ...layout.parallel_layout import ParallelLayout
        from ...protocol.messages import Sample
        from ...protocol.model_spec import Devices, ModelSpec
        from ...protocol.tensors import describe

        tensors = load_file(request.inputs)
        devices = Devices(kind="cpu", indices=tuple(range(self.ranks)))
        spec = ModelSpec(
            path=str(self.model), devices=devices, dtype="float32", layout=ParallelLayout.parse(request.layout)
        )
        message = Sample(model=spec, branches=1, sampler="euler", cfg=1.0, measure=bool(request.output), timed=True)
        reply = self.engine.handle(
            message, describe(tensors), None if self.rank else tensors, report=lambda *_: None, cancelled=lambda: False
        )
        if not reply:
            return Result()
        if request.output:
            save_file({"samples": reply["samples"].contiguous(), "sent": reply["sent_bytes"]}, request.output)
        return Result(seconds=float(reply["seconds"]))


def _runner(options: argparse.Namespace) -> LoopRunner:
    return LoopRunner(Path(options.model), Path(options.store))


if __name__ == "__main__":
    serve(_runner, LoopRequest)
