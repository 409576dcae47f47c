"""A rank with a fake engine, whose behaviour a test chooses by the name of the sampler: ``"steps"``, ``"raise 1"``, ...

Like a real rank, it imports torch only after its link to the supervisor has started.
"""

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from parallel_backend.errors import Cancelled, InvalidRequest
from parallel_backend.progress import LOADING, PROGRESS
from parallel_backend.protocol.messages import Progress, Sample, Unload
from parallel_backend.protocol.status import LoadedModel
from parallel_backend.rank.__main__ import main

if TYPE_CHECKING:
    import torch

STEP = 0.05
"""Seconds that a step takes."""
SLOW = 5.0
"""Seconds that a part of the work takes on a slow rank: longer than the tests wait for progress."""
WATCHDOG = """\
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 3] Process group watchdog thread terminated with exception: [Rank 1] Watchdog caught collective \
operation timeout: WorkNCCL(SeqNum=5, OpType=ALLREDUCE) ran for 600012 milliseconds before timing out.
Exception raised from checkTimeout at ProcessGroupNCCL.cpp:685 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation) + 0x96
"""
"""What NCCL's watchdog prints when it ends a process."""

_CALL = "NCCL error in: /pytorch/torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:3356, "
NCCL = {
    "nccl_full": f"{_CALL}unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.26.2\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
    "nccl_lost": f"{_CALL}remote process exited or there was a network error, NCCL version 2.26.2\nncclRemoteError: A "
    "call failed possibly due to a network error or a remote process exiting prematurely.\nLast error:\n"
    "socketProgress: Connection closed by remote peer localhost<41234>",
}
"""What torch raises for NCCL when this rank's device is full, and when another rank is gone."""


class FakeEngine:
    """Runs steps that take ``STEP`` seconds and end with a collective, and fails as asked in the third one."""

    def __init__(self, *, rank: int, world_size: int, device: "torch.device") -> None:
        self.rank, self.steps = rank, 0

    def snapshot(self) -> tuple[tuple[LoadedModel, ...], int, int]:
        return (), 0, self.steps

    def handle(
        self,
        message: Sample | Unload,
        metas: Any,
        tensors: "Mapping[str, torch.Tensor] | None",
        *,
        report: "Callable[[Progress, Mapping[str, torch.Tensor]], None]",
        cancelled: Callable[[], bool],
    ) -> "dict[str, torch.Tensor]":
        import torch
        import torch.distributed as dist

        if isinstance(message, Unload):
            raise InvalidRequest("there is nothing to unload")
        kind, _, rank = message.sampler.partition(" ")
        total = next(meta.shape[0] for meta in metas if meta.name == "sigmas") - 1
        if kind == "refuse":
            raise InvalidRequest("this request cannot work")
        with PROGRESS.phase(LOADING if kind in ("load", "slowload") else "sampling"):
            for step in range(total):
                PROGRESS.step(step, total)
                if step == 2 and rank == str(self.rank):
                    _misbehave(kind)
                time.sleep(STEP)
                PROGRESS.tick()
                flag = torch.tensor([int(cancelled() and kind != "deaf")])
                with PROGRESS.waiting():
                    dist.all_reduce(flag)
                if flag.item():
                    raise Cancelled(f"cancelled at step {step}")
                self.steps += 1
                if self.rank == 0:
                    report(Progress(phase="sampling", value=step + 1, total=total), {"preview": torch.ones(2, 3)})
        if kind == "late" and rank == str(self.rank):
            time.sleep(10 * STEP)
            raise KeyError("after rank 0 has answered")
        return {} if tensors is None else {"samples": tensors["x"] * 2}


def _misbehave(kind: str) -> None:
    import torch
    import torch.distributed

    if kind == "raise":
        raise KeyError("a bug")
    if kind == "shout":
        raise KeyError("a" * 1_000_000)
    if kind == "oom":
        raise torch.OutOfMemoryError("tried to allocate 3 GiB")
    if kind in NCCL:
        raise torch.distributed.DistBackendError(NCCL[kind])
    if kind == "alone":
        raise InvalidRequest("only I think so")
    if kind == "exit":
        os._exit(3)
    if kind == "quit":
        raise SystemExit(4)
    if kind in ("hang", "load"):
        time.sleep(1000.0)
    if kind == "slowload":
        time.sleep(SLOW)
    if kind == "compute":
        end = time.monotonic() + SLOW
        while time.monotonic() < end:
            pass
    if kind == "slow":
        for _ in range(10):
            time.sleep(SLOW / 5)
            PROGRESS.tick()
    if kind == "abort":
        print(WATCHDOG, file=sys.stderr, flush=True)
        os.abort()


if __name__ == "__main__":
    main(engine=FakeEngine)  # type: ignore[arg-type]
