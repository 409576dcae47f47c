"""Results of prompts and faults, and the backend's resources before and after."""

import os
import statistics
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec

from parallel_backend import env, processes

RIGHT, RESUMED, ASKED_AGAIN, ENDED, WRONG, LOST = "right", "resumed", "asked again", "ended", "wrong", "lost"
"""Outcomes: undisturbed; gone on after a step; asked again from the start; ended as somebody wanted; with a wrong
result; with an error although it could have been kept."""
BAD = (WRONG, LOST)
NOISE = 20_000_000
"""Bytes by which memory varies without a leak."""
ROOM = 24
"""Open files by which a supervisor varies: four for each of a few ranks and spare ranks."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Resources of a run's processes.

    Attributes:
        supervisor_pid: process id of the supervisor; 0 if none runs.
        processes: number of processes of the runtime folder.
        descriptors: open files of this process.
        memory: resident bytes of this process.
        supervisor: resident bytes of the supervisor.
        supervisor_descriptors: its open files.
    """

    supervisor_pid: int
    processes: int
    descriptors: int
    memory: int
    supervisor: int
    supervisor_descriptors: int

    @classmethod
    def measure(cls, folder: Path, supervisor: int | None) -> "Footprint":
        """Measure now.

        Args:
            folder: the runtime folder.
            supervisor: its supervisor's process id; None if none runs.
        """
        return cls(
            supervisor_pid=supervisor or 0,
            processes=len(processes_of(folder)),
            descriptors=_descriptors(os.getpid()),
            memory=processes.resident_memory(os.getpid()),
            supervisor=processes.resident_memory(supervisor) if supervisor else 0,
            supervisor_descriptors=_descriptors(supervisor) if supervisor else 0,
        )


@dataclass(kw_only=True)
class Ledger:
    """The account of a run.

    Attributes:
        seed: repeats its prompts and faults.
        prompts: number of prompts by outcome.
        faults: number of faults by name.
        recoveries: seconds from a fault to the next finished step, by fault, without ready spare ranks.
        with_spares: the same with ready spare ranks.
        bad: what was wrong or lost, with the error.
        start: footprint after the first prompt.
        end: footprint after the last prompt.
        same: footprint after the first prompt of the supervisor that is left at the end.
        wants_faults: whether the run makes faults.
        left: processes that have outlived the backend.
        memory: resident bytes of this process after each prompt.
        seconds: how long it took.
    """

    seed: int
    prompts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    recoveries: dict[str, list[float]] = field(default_factory=dict)
    with_spares: dict[str, list[float]] = field(default_factory=dict)
    bad: list[str] = field(default_factory=list)
    start: Footprint | None = None
    end: Footprint | None = None
    same: Footprint | None = None
    wants_faults: bool = False
    left: int = 0
    memory: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def growth(self) -> int:
        """Bytes by which the memory of this process has grown from the second third of the prompts to the last."""
        third = len(self.memory) // 3
        if not third:
            return 0
        return round(statistics.median(self.memory[-third:]) - statistics.median(self.memory[third : 2 * third]))

    @property
    def descriptors_leaked(self) -> int:
        """Open files of this process and of the last supervisor that were not there after its first prompt.

        A supervisor has some for each rank and spare rank, so only more than ``ROOM`` of them count.
        """
        if not (self.start and self.end and self.same):
            return 0
        here = self.end.descriptors - self.start.descriptors
        there = self.end.supervisor_descriptors - self.same.supervisor_descriptors
        return max(0, here) + (there if there > ROOM else 0)

    def note(self, footprint: Footprint) -> None:
        """Record the resources after a prompt."""
        self.start, self.end = self.start or footprint, footprint
        self.memory.append(footprint.memory)
        if self.same is None or self.same.supervisor_pid != footprint.supervisor_pid:
            self.same = footprint

    @property
    def passed(self) -> bool:
        """Whether nothing was lost, wrong or leaked."""
        kept = not any(self.prompts[outcome] for outcome in BAD)
        disturbed = bool(self.faults) or not self.wants_faults
        supervisor = self.end.supervisor - self.same.supervisor if self.end and self.same else 0
        steady = max(self.growth, supervisor) <= NOISE and not self.descriptors_leaked
        return kept and disturbed and steady and not self.left

    def __str__(self) -> str:
        total, faults = sum(self.prompts.values()), sum(self.faults.values())
        lines = [
            f"{'passed' if self.passed else 'FAILED'}: {total} prompts and {faults} faults in {self.seconds:.0f} s, "
            f"seed {self.seed}",
            "",
            "| prompts | |",
            "|---|---|",
            *(f"| {outcome} | {self.prompts[outcome]} |" for outcome in _OUTCOMES),
            "",
            "| fault | times | longest until the next step, s: with ready spare ranks | without |",
            "|---|---|---|---|",
            *(
                f"| {name} | {count} | {_longest(self.with_spares, name)} | {_longest(self.recoveries, name)} |"
                for name, count in sorted(self.faults.items())
            ),
            "",
            "| | start | end |",
            "|---|---|---|",
            *self._footprints(),
            "",
            f"this process grew by {self.growth / 1e6:.1f} MB from the second third of the prompts to the last, "
            f"{self.descriptors_leaked} descriptors leaked, {self.left} processes left",
            *self.bad,
        ]
        return "\n".join(lines)

    def as_json(self) -> str:
        """Return everything as JSON."""
        numbers = {"passed": self.passed, "growth": self.growth, "descriptors_leaked": self.descriptors_leaked}
        return msgspec.json.encode({**msgspec.to_builtins(self), **numbers}).decode()

    def _footprints(self) -> list[str]:
        if not (self.start and self.end):
            return []
        before, after = asdict(self.start), asdict(self.end)
        rows = []
        for name, number in before.items():
            if name == "supervisor_pid":
                continue
            in_bytes = name in ("memory", "supervisor")
            shown = [f"{value / 1e6:.1f} MB" if in_bytes else str(value) for value in (number, after[name])]
            rows.append(f"| {name.replace('_', ' ')} | {shown[0]} | {shown[1]} |")
        return rows


_OUTCOMES = (RIGHT, RESUMED, ASKED_AGAIN, ENDED, WRONG, LOST)


def _longest(recoveries: dict[str, list[float]], fault: str) -> str:
    seconds = recoveries.get(fault)
    return f"{max(seconds):.1f}" if seconds else ""


def processes_of(folder: Path) -> list[int]:
    """Return the ids of live processes whose environment names the runtime folder."""
    wanted, found = f"{env.RUNTIME}={folder}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            matches = wanted in (entry / "environ").read_bytes().split(b"\0")
            alive = (entry / "stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
        except OSError:
            continue
        if matches and alive and int(entry.name) != os.getpid():
            found.append(int(entry.name))
    return found


def _descriptors(pid: int) -> int:
    try:
        return len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return 0
