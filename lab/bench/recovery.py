"""How long a prompt takes after a rank has died: ``python -m lab bench recovery``.

A backend without spare ranks and one with them take turns.
"""

import argparse
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from parallel_backend import processes
from parallel_backend.client import devices
from parallel_backend.client.client import Client
from parallel_backend.client.temporary_backend import temporary_backend
from parallel_backend.errors import InvalidRequest, RankFailed
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.deadlines import Deadline
from parallel_backend.protocol.model_spec import ModelSpec

from .prompt import Prompt, shipped_or_tiny
from .results import add_common, document

LAYOUT = ParallelLayout(ulysses=2)
GOAL = 5.0
"""Seconds that a prompt after a death may take beyond a warm one."""
READY = 180.0
"""Seconds that the spare ranks have to become ready."""
NOTICE = 30.0
"""Seconds that the backend has to notice that an idle rank is dead."""
VICTIM, STEP = 1, 3
"""The rank that is killed, and the step after which it is killed while sampling."""
_POLL = 0.02

ROWS = {
    "warm": "a warm prompt",
    "first": "the first prompt after serve",
    "idle": "the prompt after a rank was killed while idle",
    "sampling": "the prompt after a rank was killed while sampling",
    "error": "from that kill to the error of its prompt",
}
"""What is measured, by its name in ``Recovery.seconds``."""
PROMPTS = ("first", "idle", "sampling")
"""The prompts that are compared with a warm one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--rounds", type=int, default=3, help="backends of each kind (default %(default)s)")
    add_common(parser)


def run(options: argparse.Namespace) -> int:
    """Measure how long a prompt takes after a rank died."""
    results = measure(options.rounds, options.devices)
    print(document(results) if options.json else describe(*results))
    return int(any(result.failed for result in results))


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """The results of the backends with one number of spare ranks.

    Attributes:
        spares: the number of spare ranks.
        seconds: of each round, by the names in ``ROWS``.
        spare_memory: bytes of one ready spare rank, in which a page shared by n processes counts 1/n; 0 without any.
    """

    spares: int
    seconds: dict[str, list[float]]
    spare_memory: int

    def median(self, row: str) -> float:
        """The median seconds of a row."""
        return statistics.median(self.seconds[row])

    def added(self, row: str) -> float:
        """Seconds by which the prompt of a row takes longer than a warm prompt."""
        return self.median(row) - self.median("warm")

    @property
    def failed(self) -> bool:
        """Whether spare ranks miss the goal."""
        return self.spares > 0 and any(self.added(row) > GOAL for row in PROMPTS)


def measure(rounds: int, devices_text: str | None = None) -> list[Recovery]:
    """Measure on two ranks, without and with two spare ranks.

    Raises:
        InvalidRequest: ``rounds`` is below 1, or ``devices_text`` does not name two devices.
        BackendError: the backend fails, except for the killed ranks.
    """
    if rounds < 1:
        raise InvalidRequest(f"--rounds {rounds}: at least one is needed")
    chosen = devices.choose_devices(devices_text, devices.ranks_of([LAYOUT]))
    seconds: dict[int, dict[str, list[float]]] = {n: {row: [] for row in ROWS} for n in (0, len(chosen.indices))}
    memory: dict[int, list[int]] = {n: [] for n in seconds}
    with tempfile.TemporaryDirectory(prefix="bench-recovery-") as name:
        folder = Path(name)
        prompt = Prompt(spec=ModelSpec(path=shipped_or_tiny(folder / "model"), devices=chosen, layout=LAYOUT))
        for _ in range(rounds):
            for spares, rows in seconds.items():
                with temporary_backend(folder, spares=spares) as client:
                    memory[spares].append(_round(client, prompt, spares, rows))
    return [
        Recovery(spares=n, seconds=rows, spare_memory=round(statistics.mean(memory[n]))) for n, rows in seconds.items()
    ]


def _round(client: Client, prompt: Prompt, spares: int, rows: dict[str, list[float]]) -> int:
    """Append the seconds of each row, and return the memory of one ready spare rank."""
    memory = _wait_for_spares(client, spares)
    rows["first"].append(prompt.run(client))
    rows["warm"].append(prompt.run(client))
    _wait_for_spares(client, spares)
    _kill_idle(client)
    rows["idle"].append(prompt.run(client))
    rows["warm"].append(prompt.run(client))
    _wait_for_spares(client, spares)
    rows["error"].append(_kill_sampling(client, prompt))
    rows["sampling"].append(prompt.run(client))
    return memory


def _wait_for_spares(client: Client, spares: int) -> int:
    """Wait until all spare ranks are ready, and return the memory of one of them."""

    def ready() -> bool:
        return sum(spare.ready for spare in client.status().spares) == spares

    _wait_until(ready, READY, "waiting for the spare ranks")
    pids = [spare.pid for spare in client.status().spares]
    return sum(map(processes.proportional_memory, pids)) // max(1, len(pids))


def _kill_idle(client: Client) -> None:
    processes.send_signal(client.status().ranks[VICTIM].pid, signal.SIGKILL)
    _wait_until(lambda: not client.status().ranks, NOTICE, "waiting for the backend to notice a dead rank")


def _kill_sampling(client: Client, prompt: Prompt) -> float:
    """Kill a rank in the middle of a prompt, and return the seconds from there to the prompt's error."""
    pid, killed_at = client.status().ranks[VICTIM].pid, [0.0]

    def kill(step: int) -> None:
        if step == STEP:
            killed_at[0] = time.perf_counter()
            processes.send_signal(pid, signal.SIGKILL)

    try:
        prompt.run(client, on_step=kill)
    except RankFailed:
        return time.perf_counter() - killed_at[0]
    raise RuntimeError("a prompt whose rank was killed did not fail")


def _wait_until(condition: Callable[[], bool], seconds: float, phase: str) -> None:
    deadline = Deadline(seconds, phase)
    while not condition():
        time.sleep(min(_POLL, deadline.remaining()))


def describe(without: Recovery, with_spares: Recovery) -> str:
    """Format both results as a table."""
    lines = [f"{'seconds: median (longer than a warm prompt)':52}{'no spare ranks':>20}{'spare ranks':>20}"]
    for row, text in ROWS.items():
        cells = [_cell(recovery, row) for recovery in (without, with_spares)]
        lines.append(f"{text:52}{cells[0]:>20}{cells[1]:>20}")
    outcome = "FAILED" if with_spares.failed else "passed"
    lines.append(
        f"{outcome}   at most {GOAL:g} s longer with spare ranks; a spare rank takes "
        f"{with_spares.spare_memory / 2**20:.0f} MiB of memory"
    )
    return "\n".join(lines)


def _cell(recovery: Recovery, row: str) -> str:
    seconds = f"{recovery.median(row):.2f}"
    return f"{seconds} ({recovery.added(row):+.2f})" if row in PROMPTS else seconds
