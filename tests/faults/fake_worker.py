"""A rank with a fake engine, whose behaviour a test chooses by the name of the sampler: ``"steps"``, ``"raise 1"``,
``"torch 1 OWN/ecc"``, ...

Like a real rank, it imports torch only after its link to the supervisor has started.
"""

import atexit
import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parallel_backend.errors import Cancelled, InvalidRequest
from parallel_backend.progress import CONNECTING, LOADING, PROGRESS
from parallel_backend.protocol.messages import Forward, Progress, Sample, Trial, Unload
from parallel_backend.protocol.status import LoadedModel
from parallel_backend.rank.__main__ import main
from tests.support import device_errors

if TYPE_CHECKING:
    import torch

    from parallel_backend.engine.elsewhere import Elsewhere
    from parallel_backend.engine.engine import OwnTrial
    from parallel_backend.engine.planned import Planner
    from parallel_backend.engine.request import NextStep
    from parallel_backend.protocol.messages import RankRequest

STEP = 0.05
"""Seconds that a step takes."""
SLOW = 5.0
"""Seconds that a part of the work takes on a slow rank: longer than the tests wait for progress."""
HEARD = 2.0
"""Seconds after which the supervisor has heard what a rank does."""
LATER = 1.0
"""Seconds after which the rank that caused a failure reports it, where the other ranks are to report first."""
FAILS_TO_START = Path("fails-to-start")
"""A file in the runtime folder that names a rank and its error, as samplers do."""

FAILS_TO_PREPARE, SLOW_TO_PREPARE = Path("fails-to-prepare"), Path("slow-to-prepare")
"""Files in the runtime folder: with the first, the imports of a spare rank fail; with the second, they never end."""

DIES_AS_A_RANK = Path("dies-as-a-rank")
"""A file in the runtime folder: with it, a spare rank dies when it becomes a rank."""

AT_EXIT = "[rank1]:[W] Warning: WARNING: destroy_process_group() was not called before program exit"
"""What NCCL's process group prints last of all."""
ABORT = """\
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  {}
Exception raised from checkTimeout at ProcessGroupNCCL.cpp:685 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation) + 0x96
"""
"""What a process prints that a thread of NCCL's ends."""


class FakeEngine:
    """Runs steps that take ``STEP`` seconds and end with a collective, and fails as asked in the third one."""

    def __init__(self, *, rank: int, world_size: int, device: "torch.device", **others: object) -> None:
        self.rank, self.world_size, self.device, self.steps = rank, world_size, device, 0
        self.elsewhere: Elsewhere | None = None
        self.trials: Mapping[str, OwnTrial] = {}
        self.planner: Planner | None = None
        if DIES_AS_A_RANK.exists() and "--spare" in sys.argv:
            os._exit(5)
        if FAILS_TO_START.exists():
            culprit, name = FAILS_TO_START.read_text().split(" ", 1)
            atexit.register(print, AT_EXIT, file=sys.stderr)
            _blame(name, culprit == str(rank))

    def rest(self) -> None:
        """It keeps nothing."""

    def snapshot(self) -> tuple[tuple[LoadedModel, ...], int, int]:
        return (), 0, self.steps

    def kept_names(self, message: object, metas: object) -> tuple[str, ...]:
        return ()

    def handle(
        self,
        message: "RankRequest",
        metas: Any,
        tensors: "Mapping[str, torch.Tensor] | None",
        *,
        report: "Callable[[Progress, Mapping[str, torch.Tensor]], None]",
        cancelled: Callable[[], bool],
        next_step: "NextStep",
    ) -> "dict[str, torch.Tensor]":
        if isinstance(message, Trial):
            from lab.engine.echo import echo

            return echo(message, tensors, report)
        if isinstance(message, Forward):
            return self._run(message, metas, tensors, next_step)
        if isinstance(message, Unload):
            raise InvalidRequest("there is nothing to unload")
        assert isinstance(message, Sample)
        kind, rank, name = (*message.sampler.split(" ", 2), "", "")[:3]
        culprit = rank == str(self.rank)
        if kind == "stubborn":
            _ignore_signals()
        if kind == "refuse":
            raise InvalidRequest(f"this request cannot work: {message.sampler}")
        total = next(meta.shape[0] for meta in metas if meta.name == "sigmas") - 1
        phase = {"load": LOADING, "slowload": LOADING, "connect": CONNECTING}.get(kind, "sampling")
        with PROGRESS.phase(phase):
            for step in range(total):
                PROGRESS.step(step, total)
                _fail_in(step, kind, name, culprit=culprit)
                self._step(step, total, report, (lambda: False) if kind == "deaf" else cancelled)
        if kind == "late" and culprit:
            time.sleep(10 * STEP)
            raise KeyError("after rank 0 has answered")
        return {} if tensors is None else {"samples": tensors["x"] * 2}

    def _run(
        self, message: Forward, metas: Any, tensors: "Mapping[str, torch.Tensor] | None", next_step: "NextStep"
    ) -> "dict[str, torch.Tensor]":
        """Take the steps of a run."""
        from parallel_backend.distributed.world import world
        from parallel_backend.engine.denoising import further_steps
        from parallel_backend.engine.request import ActiveRequest
        from parallel_backend.protocol.run_key import is_changing

        request = ActiveRequest(
            message=message, metas=metas, tensors=tensors, received=(), report=lambda *_: None,
            cancelled=lambda: False, next_step=next_step,
        )  # fmt: skip
        run: Any = _FakeRun(self, [meta for meta in metas if is_changing(meta) and not meta.same], tensors)
        return further_steps(run, request, run.step(), world(self.rank, self.world_size))

    def _step(
        self,
        step: int,
        total: int,
        report: "Callable[[Progress, Mapping[str, torch.Tensor]], None]",
        cancelled: Callable[[], bool],
    ) -> None:
        """Take a step's time, agree with the other ranks whether the request was cancelled, and report the step."""
        import torch
        import torch.distributed as dist

        time.sleep(STEP)
        PROGRESS.tick()
        flag = torch.tensor([int(cancelled())])
        with PROGRESS.waiting():
            dist.all_reduce(flag)
        if flag.item():
            raise Cancelled(f"cancelled at step {step}")
        self.steps += 1
        if self.rank == 0:
            report(Progress(phase="sampling", value=step + 1, total=total), {"preview": torch.ones(2, 3)})


class _FakeRun:
    """Doubles latents, after ``STEP`` seconds."""

    def __init__(self, engine: FakeEngine, metas: Any, tensors: "Mapping[str, torch.Tensor] | None") -> None:
        self._engine, self._metas, self._tensors = engine, metas, tensors

    def begin_step(self, tensors: "Mapping[str, torch.Tensor] | None", world: Any) -> bool:
        from parallel_backend.distributed.broadcast import broadcast_if_any

        self._tensors = broadcast_if_any(self._metas, tensors, world)
        return self._tensors is not None

    def step(self) -> "dict[str, torch.Tensor]":
        time.sleep(STEP)
        self._engine.steps += 1
        return {} if self._engine.rank or not self._tensors else {"0": self._tensors["0.hidden_states"] * 2}


def prepare() -> Iterator[None]:
    """What a spare rank does instead of imports."""
    if FAILS_TO_PREPARE.exists():
        raise ImportError("a broken package")
    while SLOW_TO_PREPARE.exists():
        yield
        time.sleep(STEP)


def _error(name: str) -> Exception:
    """Return the error of this name, such as ``"OWN/ecc"``."""
    table, _, name = name.partition("/")
    return device_errors.TABLES[table][name].make()


def _abort(name: str) -> None:
    print(ABORT.format(_error(name)), file=sys.stderr, flush=True)
    os.abort()


def _blame(name: str, culprit: bool, *, aborts: bool = False) -> None:
    """Fail on all ranks: the culprit after the others, which only notice it, or which NCCL's watchdog ends."""
    if culprit:
        time.sleep(LATER)
        raise _error(name)
    if aborts:
        _abort("PEER/timeout")
    raise _error("PEER/lost")


def _ignore_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)


def _fail_in(step: int, kind: str, name: str, *, culprit: bool) -> None:
    """Do before a step what the kind of the request asks for. ``culprit``: whether this is the rank that it names."""
    if step == 2 and kind in ("blame", "accuse"):
        _blame(name, culprit, aborts=kind == "accuse")
    if step == 0 and kind == "talk" and culprit:
        os.write(2, b"its last words\n")
    if step == 2 and culprit:
        _misbehave(kind, name)


def _misbehave(kind: str, name: str) -> None:
    if kind == "raise":
        raise KeyError("a bug")
    if kind == "shout":
        raise KeyError("a" * 1_000_000)
    if kind == "torch":
        raise _error(name)
    if kind == "alone":
        raise InvalidRequest("only I think so")
    if kind == "exit":
        os._exit(3)
    if kind == "quit":
        raise SystemExit(4)
    if kind in ("hang", "load"):
        time.sleep(1000.0)
    if kind == "connect":
        time.sleep(HEARD)
        ctypes.PyDLL(None).sleep(1000)  # does not release Python's lock, so no heartbeat is sent
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
        _abort(name)


if __name__ == "__main__":
    main(engine=FakeEngine, prepare=prepare)
