"""A real rank that does not start, or sends a signal after a step, as files in the runtime folder say."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parallel_backend.progress import PROGRESS
from parallel_backend.rank import worker
from parallel_backend.rank.__main__ import main

LOST_DEVICES = Path("lost-devices")
"""Lists the numbers of ranks that do not start."""
CLIENT_TIMEOUT = Path("client-timeout")
"""The seconds that ranks wait for a client that reads nothing."""
SIGNALS = Path("signals")
"""Lines ``rank step target signal``: after that step the rank of the first line sends it, and the line goes."""
SELF, SUPERVISOR = "self", "supervisor"
"""Targets of signals."""


def _engine(*, rank: int, world_size: int, device: Any) -> Any:
    from parallel_backend.engine.engine import Engine

    if LOST_DEVICES.exists() and str(rank) in LOST_DEVICES.read_text().split():
        raise RuntimeError("CUDA error: the device is not there")
    if CLIENT_TIMEOUT.exists():
        vars(worker)["CLIENT_TIMEOUT"] = float(CLIENT_TIMEOUT.read_text())
    vars(PROGRESS)["step"] = _signalling(PROGRESS.step, rank)
    return Engine(rank=rank, world_size=world_size, device=device)


def _signalling(count: Callable[[int, int], None], rank: int) -> Callable[[int, int], None]:
    def step(done: int, total: int) -> None:
        count(done, total)
        lines = SIGNALS.read_text().splitlines() if SIGNALS.exists() else []
        if lines and lines[0].split()[:2] == [str(rank), str(done)]:
            target, number = lines[0].split()[2:]
            SIGNALS.write_text("\n".join(lines[1:]))
            os.kill(os.getpid() if target == SELF else os.getppid(), int(number))

    return step


if __name__ == "__main__":
    os.chdir(os.environ["PARALLEL_DIT_RUNTIME"])
    main(engine=_engine)
