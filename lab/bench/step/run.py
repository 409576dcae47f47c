"""Timing single steps. Contestants alternate within each round, so that other work on the machine affects all alike."""

import os
import random
import statistics
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from parallel_backend.errors import BackendError
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.model_spec import Devices, DType

from ..ranks.cases import Case, write_model
from ..ranks.peers import ONE_PROCESS, PEERS, Peer
from .contestants import Contestant, FirstStep, contestants

Log = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of one contestant in one case.

    Attributes:
        name: the layout, or the peer's name.
        ours: whether it is one of our layouts rather than a peer.
        seconds: median over its steps.
        all_seconds: its steps, by round.
        speedup: median over the rounds of one process's seconds divided by this contestant's.
        fastest: one process's fastest step divided by this contestant's fastest: the ratio that is left when other
            work slows the cores now and then.
        against_best: like ``speedup``, over the fastest peer on several ranks; None without such a peer.
        max_rel_error: of the prediction, relative to one process's.
        sent_bytes: by rank, in one step.
    """

    name: str
    ours: bool
    seconds: float
    all_seconds: tuple[float, ...]
    speedup: float
    fastest: float
    against_best: float | None
    max_rel_error: float
    sent_bytes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Table:
    """The results of one case.

    Attributes:
        case: what was timed.
        rows: one per contestant that ran.
        left_out: by contestant without a row, the reason.
        best_peer: the fastest peer on several ranks; None without such a peer.
        load: the machine's load average before and after.
    """

    case: Case
    rows: tuple[Row, ...]
    left_out: Mapping[str, str]
    best_peer: str | None
    load: tuple[float, float]


def measure(
    cases: Sequence[Case], layouts: Sequence[ParallelLayout], devices: Devices, *, rounds: int, peers: Sequence[Peer],
    log: Log, dtype: DType = "float32",
) -> Generator[Table, None, None]:  # fmt: skip
    """Time all contestants in each case and yield its table when it is complete.

    All cases share a family. The processes live until the generator ends or is closed.

    Args:
        cases: what to time.
        layouts: our layouts.
        devices: as many as the largest contestant has ranks.
        rounds: timed steps of each contestant.
        peers: other contestants beside one process and the layouts.
        log: called with the current work.
        dtype: of all computation.

    Raises:
        BackendError: one process, the baseline of all ratios, fails.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        model = write_model(Path(folder) / "model", cases[0].family)
        obstacles = {peer.name: reason for peer in peers if (reason := peer.obstacle(devices))}
        able = [peer for peer in peers if peer.name not in obstacles]
        with contestants(layouts, able, devices, model, Path(folder), dtype) as everyone:
            for case in cases:
                yield _table(case, everyone, obstacles, rounds, log)


def _table(case: Case, everyone: Sequence[Contestant], obstacles: Mapping[str, str], rounds: int, log: Log) -> Table:
    load_before = os.getloadavg()[0]
    left_out = dict(obstacles)
    first_steps: dict[str, FirstStep] = {}
    for contestant in everyone:
        if not contestant.supports(case):
            continue
        log(f"{case}: {contestant.name}")
        try:
            first_steps[contestant.name] = contestant.first_step(case)
        except BackendError as error:
            if contestant.name == ONE_PROCESS.name:
                raise
            left_out[contestant.name] = str(error)
    seconds = _rounds(case, [each for each in everyone if each.name in first_steps], rounds, log)
    best = _best_peer(seconds)
    return Table(
        case=case,
        rows=tuple(_row(name, first_steps, seconds, best) for name in first_steps),
        left_out=left_out,
        best_peer=best,
        load=(load_before, os.getloadavg()[0]),
    )


def _rounds(case: Case, running: Sequence[Contestant], rounds: int, log: Log) -> dict[str, list[float]]:
    """Return the seconds of one step per contestant and round; the order of contestants is shuffled every round.

    An untimed step precedes each timed one, so that caches hold the contestant's own model, as in all steps of a
    sampling run but the first.
    """
    seconds: dict[str, list[float]] = {contestant.name: [] for contestant in running}
    shuffle = random.Random(0)
    for index in range(rounds):
        log(f"{case}: round {index + 1} of {rounds}")
        for contestant in shuffle.sample(running, len(running)):
            contestant.timed_step(case)
            seconds[contestant.name].append(contestant.timed_step(case))
    return seconds


def _best_peer(seconds: Mapping[str, Sequence[float]]) -> str | None:
    """The peer on several ranks with the lowest median."""
    medians = {
        peer.name: statistics.median(seconds[peer.name]) for peer in PEERS if peer.ranks > 1 and peer.name in seconds
    }
    return min(medians, key=medians.__getitem__) if medians else None


def _row(
    name: str, first_steps: Mapping[str, FirstStep], seconds: Mapping[str, Sequence[float]], best: str | None
) -> Row:
    first_step = first_steps[name]
    reference, prediction = (each.prediction.float() for each in (first_steps[ONE_PROCESS.name], first_step))
    return Row(
        name=name,
        ours=name not in {peer.name for peer in (ONE_PROCESS, *PEERS)},
        seconds=statistics.median(seconds[name]),
        all_seconds=tuple(seconds[name]),
        speedup=_speedup(seconds[name], seconds[ONE_PROCESS.name]),
        fastest=min(seconds[ONE_PROCESS.name]) / min(seconds[name]),
        against_best=None if best is None else _speedup(seconds[name], seconds[best]),
        max_rel_error=float((prediction - reference).abs().max() / reference.abs().max()),
        sent_bytes=first_step.sent,
    )


def _speedup(seconds: Sequence[float], baseline: Sequence[float]) -> float:
    """The median over the rounds of the baseline's seconds divided by these."""
    return statistics.median(base / other for base, other in zip(baseline, seconds, strict=True))
