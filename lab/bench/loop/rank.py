"""One rank of step loops: ``python -m lab.bench.loop.rank``, started by ``loop.run``.

The process holds an engine without a supervisor, so that each rank may run in a network namespace of its own. It ends
with its parent.
"""

import argparse
import os
from typing import Literal

import msgspec

from ..ranks.rank import Result, serve, start


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

    def __init__(self, options: argparse.Namespace) -> None:
        self.rank, self.ranks, self.model = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), options.model
        device = start(options, threads=1)
        from lab.engine.engine import LabEngine

        self.engine = LabEngine(rank=self.rank, world_size=self.ranks, device=device)

    def run(self, request: LoopRequest) -> Result:
        """Run all steps."""
        from safetensors.torch import load_file, save_file

        from parallel_backend.layout.parallel_layout import ParallelLayout
        from parallel_backend.protocol.messages import Measure, Sample
        from parallel_backend.protocol.model_spec import Devices, ModelSpec
        from parallel_backend.protocol.tensors import describe

        tensors = load_file(request.inputs)
        kind: Literal["cuda", "cpu"] = "cuda" if self.engine.device.type == "cuda" else "cpu"
        devices = Devices(kind=kind, indices=tuple(range(self.ranks)))
        spec = ModelSpec(path=self.model, devices=devices, dtype="float32", layout=ParallelLayout.parse(request.layout))
        measure: Measure = "bytes" if request.output else "seconds"
        message = Sample(model=spec, branches=1, sampler="euler", cfg=1.0, measure=measure)
        reply = self.engine.handle(
            message, describe(tensors), None if self.rank else tensors, report=lambda *_: None, cancelled=lambda: False
        )
        if not reply:
            return Result()
        if request.output:
            save_file({"samples": reply["samples"].contiguous(), "sent": reply["sent_bytes"]}, request.output)
        return Result(seconds=float(reply["seconds"]))


if __name__ == "__main__":
    serve(LoopRunner, LoopRequest)
