"""A real rank that does not start, or sends a signal, as files in the runtime folder say."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parallel_backend.machines.ranks.elsewhere import find
from parallel_backend.progress import PROGRESS
from parallel_backend.rank import worker
from parallel_backend.rank.__main__ import main

LOST_DEVICES = Path("lost-devices")
"""Lists the numbers of ranks that do not start."""
CLIENT_TIMEOUT = Path("client-timeout")
"""The seconds that ranks wait for a client that reads nothing. The buffers of its socket are small then."""
SIGNALS = Path("signals")
"""Lines ``rank step target signal``: after that step the rank of the first line sends it, and the line goes. The step
may be one of sampling or of the VAE, or ``UNLOAD``."""
UNLOAD = "unload"
"""Stands for a step: the model's weights have been freed, and the request has not ended."""
CUT_OFF = Path("cut-off")
"""Holds the number of a rank and a weight file, which is cut off once the rank has mapped a part of it."""
SELF, SUPERVISOR = "self", "supervisor"
"""Targets of signals."""


def _engine(*, rank: int, **options: Any) -> Any:
    from lab.engine.engine import LabEngine
    from parallel_backend.engine import engine
    from parallel_backend.protocol import tensors

    if LOST_DEVICES.exists() and str(rank) in LOST_DEVICES.read_text().split():
        raise RuntimeError("CUDA error: the device is not there")
    if CLIENT_TIMEOUT.exists():
        vars(worker)["CLIENT_TIMEOUT"] = float(CLIENT_TIMEOUT.read_text())
        vars(tensors)["SOCKET_BUFFER"] = 1 << 16
    _cut_off(rank)
    vars(PROGRESS)["step"] = _signalling(PROGRESS.step, rank)
    vars(engine)["free"] = _freeing(vars(engine)["free"], rank)
    return LabEngine(rank=rank, **options)


def _cut_off(rank: int) -> None:
    import numpy as np

    mapped = np.memmap

    def cutting_off(file: Any, *arguments: Any, **options: Any) -> Any:
        data = mapped(file, *arguments, **options)
        number, _, wanted = CUT_OFF.read_text().partition(" ") if CUT_OFF.exists() else ("", "", "")
        if (number, wanted) == (str(rank), str(file)):
            CUT_OFF.unlink()
            os.truncate(file, os.path.getsize(file) // 2)
        return data

    vars(np)["memmap"] = cutting_off


def _signalling(count: Callable[[int, int], None], rank: int) -> Callable[[int, int], None]:
    def step(done: int, total: int) -> None:
        count(done, total)
        _send(rank, str(done))

    return step


def _freeing(free: Callable[[Any], None], rank: int) -> Callable[[Any], None]:
    def signalling(device: Any) -> None:
        free(device)
        _send(rank, UNLOAD)

    return signalling


def _send(rank: int, step: str) -> None:
    """Send the signal that this rank is to send after a step, if there is one."""
    lines = SIGNALS.read_text().splitlines() if SIGNALS.exists() else []
    if lines and lines[0].split()[:2] == [str(rank), step]:
        target, number = lines[0].split()[2:]
        SIGNALS.write_text("\n".join(lines[1:]))
        os.kill(os.getpid() if target == SELF else os.getppid(), int(number))


if __name__ == "__main__":
    os.chdir(os.environ["PARALLEL_DIT_RUNTIME"])
    main(engine=_engine, elsewhere=find)
