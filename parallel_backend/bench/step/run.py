"""The benchmark itself: contestants take turns in rounds, so that whatever else the machine does meets them alike."""

import os
import random
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import BackendError
from ...layout.parallel_layout import ParallelLayout
from ..ranks.cases import Case, write_model
from ..ranks.peers import ONE, PEERS, Peer
from .contestants import Contestant, First, contestants

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Row:
    """What came of a contestant in a case.

    Attributes:
        ours: whether it is a layout of ours, and not a peer.
        seconds: median of its steps; ``all_seconds``: each of them, by round.
        speedup: median over the rounds of one process's seconds by its own.
        fastest: one process's fastest step by its own: what is left where other work slows the cores now and then.
        against_best: the same with the seconds of the fastest peer on several ranks; None without one.
        max_rel_error: of the prediction, against that of one process.
        sent_bytes: by rank, in a step.
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
    """A case: one row a contestant, and why the others have none."""

    case: Case
    rows: tuple[Row, ...]
    left_out: Mapping[str, str]
    best_peer: str | None
    load: tuple[float, float]
    """The machine's load average before and after."""


def measure(
    cases: Sequence[Case], layouts: Sequence[ParallelLayout], *, rounds: int, peers: bool, say: Say
) -> list[Table]:
    """Time all contestants in all cases, of one family, on processes that live as long as this call.

    ``say`` is told what is under way.

    Raises:
        BackendError: one process, which all are compared with, fails.
    """
    chosen = PEERS if peers else PEERS[:1]
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        model = write_model(Path(folder) / "model", cases[0].family)
        with contestants(layouts, [peer for peer in chosen if not peer.missing], model, Path(folder)) as everyone:
            missing = {peer.name: peer.missing for peer in chosen if peer.missing}
            return [_table(case, everyone, missing, rounds, say) for case in cases]


def _table(case: Case, everyone: Sequence[Contestant], missing: Mapping[str, str], rounds: int, say: Say) -> Table:
    before = os.getloadavg()[0]
    left_out = dict(missing)
    firsts: dict[str, First] = {}
    for contestant in everyone:
        if not contestant.takes(case):
            continue
        say(f"{case}: {contestant.name}")
        try:
            firsts[contestant.name] = contestant.first(case)
        except BackendError as error:
            if contestant.name == ONE.name:
                raise
            left_out[contestant.name] = str(error)
    seconds = _rounds(case, [each for each in everyone if each.name in firsts], rounds, say)
    best = _best(seconds)
    return Table(
        case=case,
        rows=tuple(_row(name, firsts, seconds, best) for name in firsts),
        left_out=left_out,
        best_peer=best,
        load=(before, os.getloadavg()[0]),
    )


def _rounds(case: Case, running: Sequence[Contestant], rounds: int, say: Say) -> dict[str, list[float]]:
    """Seconds by contestant, of one step of each a round, in another order each round.

    Each step follows one that is not timed, as all but the first do while sampling: caches are those of its own model.
    """
    seconds: dict[str, list[float]] = {contestant.name: [] for contestant in running}
    shuffle = random.Random(0)
    for turn in range(rounds):
        say(f"{case}: round {turn + 1} of {rounds}")
        for contestant in shuffle.sample(running, len(running)):
            contestant.seconds(case)
            seconds[contestant.name].append(contestant.seconds(case))
    return seconds


def _best(seconds: Mapping[str, Sequence[float]]) -> str | None:
    medians = {peer.name: statistics.median(seconds[peer.name]) for peer in _several(PEERS) if peer.name in seconds}
    return min(medians, key=medians.__getitem__) if medians else None


def _several(peers: Sequence[Peer]) -> list[Peer]:
    return [peer for peer in peers if peer.ranks > 1]


def _row(name: str, firsts: Mapping[str, First], seconds: Mapping[str, Sequence[float]], best: str | None) -> Row:
    wanted, own = firsts[ONE.name].prediction, firsts[name]
    return Row(
        name=name,
        ours=name not in {peer.name for peer in (ONE, *PEERS)},
        seconds=statistics.median(seconds[name]),
        all_seconds=tuple(seconds[name]),
        speedup=_ratio(seconds[ONE.name], seconds[name]),
        fastest=min(seconds[ONE.name]) / min(seconds[name]),
        against_best=None if best is None else _ratio(seconds[best], seconds[name]),
        max_rel_error=float((own.prediction - wanted).abs().max() / wanted.abs().max()),
        sent_bytes=own.sent,
    )


def _ratio(theirs: Sequence[float], own: Sequence[float]) -> float:
    return statistics.median(one / other for one, other in zip(theirs, own, strict=True))
