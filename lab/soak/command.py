"""Random prompts and faults for a while, and their ledger: ``python -m lab soak``."""

import argparse
import random
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from parallel_backend.client.client import Client
from parallel_backend.client.retry import Recovery, RetriedRequest
from parallel_backend.client.temporary_backend import temporary_backend
from parallel_backend.errors import BackendError, InvalidRequest
from parallel_backend.protocol.messages import Progress

from . import step_by_step
from .faults import FAULTS, Fault, Target
from .ledger import ASKED_AGAIN, ENDED, LOST, RESUMED, RIGHT, WRONG, Footprint, Ledger, processes_of
from .prompts import Prompt, Prompts

FAULT_RATE = 0.6
"""How many of the prompts are disturbed."""
WAIT_RATE, WAIT = 0.5, 60.0
"""How many of the disturbed prompts wait for spare ranks first, and for how many seconds at most."""
MOST_RANKS = 8
EXIT = 20.0
"""Seconds in which the processes of a stopped backend have to be gone."""


@dataclass(frozen=True, kw_only=True)
class SoakOptions:
    """The options of a run.

    Attributes:
        minutes: time in which prompts are made.
        faults: whether the backend is disturbed.
        seed: of prompts and faults. Timing still varies, such as the step in which a fault arrives.
        ranks: number of CPU ranks.

    Raises:
        InvalidRequest: a value is invalid.
    """

    minutes: float
    faults: bool
    seed: int
    ranks: int

    def __post_init__(self) -> None:
        if not self.minutes > 0:
            raise InvalidRequest(f"--minutes {self.minutes:g}: a number above 0 works")
        if not 2 <= self.ranks <= MOST_RANKS:
            raise InvalidRequest(f"--ranks {self.ranks}: 2 to {MOST_RANKS} works")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--minutes", type=float, default=10.0, help="how long (default %(default)g)")
    parser.add_argument("--faults", action="store_true", help="kill, stop and disturb the backend's processes, too")
    parser.add_argument("--seed", type=int, help="repeats the prompts and faults of a run (default: a new one)")
    parser.add_argument("--ranks", type=int, default=3, help="number of CPU ranks (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the ledger as JSON")


def parse(options: argparse.Namespace) -> SoakOptions:
    """Return the checked options."""
    seed = random.SystemRandom().randrange(1 << 32) if options.seed is None else options.seed
    return SoakOptions(minutes=options.minutes, faults=options.faults, seed=seed, ranks=options.ranks)


def run(options: argparse.Namespace) -> int:
    """Make prompts and faults, print their results, and return the exit status."""
    ledger = soak(parse(options))
    print(ledger.as_json() if options.json else ledger)
    return 0 if ledger.passed else 1


def soak(options: SoakOptions) -> Ledger:
    """Make prompts until the time is up, and return their results."""
    ledger, start = Ledger(seed=options.seed, wants_faults=options.faults), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pdit-soak-") as name:
        folder = Path(name)
        # A fault's random choices depend on the live ranks, so prompts have a generator of their own.
        chooser, targets = random.Random(options.seed), random.Random(options.seed + 1)
        prompts = Prompts(folder, chooser, options.ranks)
        with temporary_backend(folder, spares=options.ranks) as client:
            while not ledger.prompts or time.monotonic() - start < 60 * options.minutes:
                name = chooser.choice(list(FAULTS)) if chooser.random() < FAULT_RATE and options.faults else ""
                _one(client, prompts, name, chooser, targets, ledger)
                ledger.note(_footprint(client))
        ledger.left = _left(client.endpoint.folder)
    ledger.seconds = time.monotonic() - start
    return ledger


def _one(
    client: Client, prompts: Prompts, name: str, chooser: random.Random, targets: random.Random, ledger: Ledger
) -> None:
    """Make one prompt, and disturb it with the fault of this name, if any."""
    prompt = prompts.next()
    run = _Run(client, prompts, prompt, FAULTS.get(name), chooser.randrange(1, prompt.steps), targets)
    waits = chooser.random() < WAIT_RATE and bool(name)
    try:
        prompts.prepare(client, prompt)
        if waits:
            run.wait_for_spares()
        outcome, error = run.run()
    except BackendError as failure:
        outcome, error = LOST, f"on one rank: {type(failure).__name__}: {failure}"
    ledger.prompts[outcome] += 1
    if outcome in (WRONG, LOST):
        ledger.bad.append(f"{outcome}: {prompt}, {name or 'no fault'}: {error}")
    if run.disturbed:
        ledger.faults[name] += 1
    if run.recovery is not None:
        recoveries = ledger.with_spares if run.had_spares else ledger.recoveries
        recoveries.setdefault(name, []).append(run.recovery)


class _Run:
    """One prompt, disturbed after a step.

    Attributes:
        disturbed: whether the fault has happened.
        had_spares: whether spare ranks were ready then.
        recovery: seconds from the fault to the next step of the recovered ranks; None if no recovery was needed.
    """

    def __init__(
        self, client: Client, prompts: Prompts, prompt: Prompt, fault: Fault | None, step: int, chooser: random.Random
    ) -> None:
        self._client, self._prompts, self._prompt, self._fault, self._step = client, prompts, prompt, fault, step
        self._target = Target(client=client, chooser=chooser, most_ranks=prompts.ranks)
        self._said: list[str] = []
        self._disturbed_at: float | None = None
        self.disturbed = self.had_spares = False
        self.recovery: float | None = None

    def wait_for_spares(self) -> None:
        """Wait until spare ranks are ready, which they become while the backend has nothing to do."""
        end = time.monotonic() + WAIT
        with suppress(BackendError):  # no backend runs, so the prompt starts one
            while not self._target.has_spares() and time.monotonic() < end:
                time.sleep(0.1)

    def run(self) -> tuple[str, str]:
        """Return the outcome, and the error if there was one."""
        prompt, prompts = self._prompt, self._prompts
        if self._fault and self._fault.idle:
            self._disturb(self._fault)
        try:
            samples = self._samples()
        except BackendError as error:
            wanted = self._fault.ends if self._fault and self.disturbed else None
            return ENDED if wanted and isinstance(error, wanted) else LOST, f"{type(error).__name__}: {error}"
        finally:
            self._target.release()
        if not prompts.is_right(prompt, samples):
            return WRONG, "; ".join(self._said)
        if not self._said:
            return RIGHT, ""
        return RESUMED if "going on after step" in self._said[-1] else ASKED_AGAIN, ""

    def _samples(self) -> Tensor:
        prompt, folder = self._prompt, self._prompts.model(self._prompt)
        interrupted = self._target.interrupt.is_set
        if prompt.step_by_step:
            return step_by_step.sample(
                self._client, prompt.model(folder), prompt.loop, interrupted=interrupted,
                on_progress=self._progressed, notify=self._said.append,
            )  # fmt: skip
        request = RetriedRequest(
            self._client, prompt.message(folder), prompt.loop.tensors(), interrupted=interrupted,
            on_progress=self._progressed, recovery=Recovery(notify=self._said.append),
        )  # fmt: skip
        return request.run()["samples"]

    def _progressed(self, progress: Progress, tensors: dict[str, Tensor]) -> None:
        if progress.phase != "sampling":
            return
        if self._disturbed_at is not None:
            if self._said and self.recovery is None:
                self.recovery = time.monotonic() - self._disturbed_at
        elif self._fault and progress.value >= self._step:
            self._disturb(self._fault)

    def _disturb(self, fault: Fault) -> None:
        self._disturbed_at = time.monotonic()
        with suppress(BackendError, OSError):  # nothing is left to disturb
            self.had_spares = self._target.has_spares()
            fault.inject(self._target)
            self.disturbed = True


def _footprint(client: Client) -> Footprint:
    try:
        supervisor = client.status().pid
    except BackendError:
        supervisor = None
    return Footprint.measure(client.endpoint.folder, supervisor)


def _left(folder: Path) -> int:
    end = time.monotonic() + EXIT
    while processes_of(folder) and time.monotonic() < end:
        time.sleep(0.1)
    return len(processes_of(folder))
