"""What this process works on and how far it is: the code that works counts, and the heartbeat's thread reads.

Counting takes about a microsecond, so that it can be done for every block of a transformer.
"""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

IDLE = ""
"""The phase of a rank that has no request."""
STARTING = "starting"
CONNECTING = "connecting to the other ranks"
PREPARING = "preparing the request"
LOADING = "loading weights"
COMPILING = "compiling"
CLIENT = "waiting for the client"
"""Phases that the supervisor treats in a way of their own, and ``PREPARING``, which a request begins with."""

_KEPT = 64
"""Durations that are kept of each phase."""
_INTERVAL = 0.5
"""Least seconds over which the use of CPU time is measured."""
_BUSY = 0.1
"""Share of one core above which a process computes. A rank that only sends heartbeats uses a thousandth of one."""


@dataclass(frozen=True, kw_only=True)
class RankProgress:
    """How far a rank is.

    Attributes:
        phase: what it does, as in "while sampling"; ``IDLE`` without a request.
        step: steps of the phase that are done.
        steps: all steps of the phase; 0 if it is not known or has none.
        count: blocks, layers and tensors that it has done since the request began.
        quiet: seconds since the last of them, or since anything else changed here.
        longest: seconds that the slowest of the phase's last counts took, waits for other ranks left out. 0 before the
            second one in the process's life: what it computes first may include the compilation of kernels.
        waiting: whether it waits for other ranks in a collective.
        computing: whether the process has used its cores since the last reading.
    """

    phase: str = IDLE
    step: int = 0
    steps: int = 0
    count: int = 0
    quiet: float = 0.0
    longest: float = 0.0
    waiting: bool = False
    computing: bool = False

    def __str__(self) -> str:
        """The phase and its step, for people: ``"sampling (step 3 of 20)"``."""
        return f"{self.phase} (step {min(self.step + 1, self.steps)} of {self.steps})" if self.steps else self.phase


class ProgressCounter:
    """Counts what one thread does. Any thread may read.

    Attributes:
        marker: for work that the host only starts. It marks the end of what was started so far, and returns whether
            the device has reached that end. None where work is done when a call returns.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, cpu_clock: Callable[[], float] = time.process_time
    ) -> None:
        self.marker: Callable[[], Callable[[], bool]] | None = None
        self._clock, self._cpu_clock = clock, cpu_clock
        self._lock = threading.Lock()
        self._pending: deque[Callable[[], bool]] = deque()
        self._durations: dict[str, deque[float]] = {}
        self._place = (IDLE, 0, 0)
        self._count, self._waiting, self._computing = 0, False, False
        self._changed = self._began = self._entered = self._read_at = clock()
        self._spent: dict[str, float] = defaultdict(float)
        self._cpu_read = cpu_clock()

    def tick(self) -> None:
        """Count one more part of the work."""
        reached = self.marker() if self.marker else None
        with self._lock:
            if reached is None:
                self._advance()
            else:
                self._pending.append(reached)
                self._drain()

    def step(self, done: int, total: int) -> None:
        """Note how many steps of the phase are done."""
        with self._lock:
            self._place = (self._place[0], done, total)
            self._changed = self._clock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Work in a phase while the context lasts. Phases may be nested; the innermost one counts."""
        outer = self._enter((name, 0, 0))
        try:
            yield
        finally:
            self._enter(outer)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait for other ranks while the context lasts."""
        with self._lock:
            entered = self._changed = self._clock()
            self._waiting = True
        try:
            yield
        finally:
            with self._lock:
                self._changed = self._clock()
                self._began += self._changed - entered
                self._waiting = False

    def read(self) -> RankProgress:
        """How far the work is now."""
        with self._lock:
            self._drain()
            self._measure_cpu()
            phase, step, steps = self._place
            return RankProgress(
                phase=phase,
                step=step,
                steps=steps,
                count=self._count,
                quiet=self._clock() - self._changed,
                longest=max(self._durations.get(phase, ()), default=0.0),
                waiting=self._waiting,
                computing=self._computing,
            )

    def spent(self) -> dict[str, float]:
        """Seconds by phase of the current or last request, up to its last change of phase."""
        with self._lock:
            return dict(self._spent)

    def _enter(self, place: tuple[str, int, int]) -> tuple[str, int, int]:
        """Change the phase; return the one before."""
        with self._lock:
            outer, self._place = self._place, place
            self._changed = self._began = self._clock()
            if outer[0] == IDLE:
                self._spent.clear()
            else:
                self._spent[outer[0]] += self._changed - self._entered
            self._entered = self._changed
            if IDLE in (place[0], outer[0]):
                self._pending.clear()
                self._count = 0
            return outer

    def _advance(self) -> None:
        now, phase = self._clock(), self._place[0]
        if phase in self._durations:
            self._durations[phase].append(now - self._began)
        else:
            self._durations[phase] = deque(maxlen=_KEPT)
        self._count += 1
        self._changed = self._began = now

    def _drain(self) -> None:
        while self._pending and self._pending[0]():
            self._pending.popleft()
            self._advance()

    def _measure_cpu(self) -> None:
        now, cpu = self._clock(), self._cpu_clock()
        if now - self._read_at >= _INTERVAL:
            self._computing = cpu - self._cpu_read > _BUSY * (now - self._read_at)
            self._read_at, self._cpu_read = now, cpu


PROGRESS = ProgressCounter()
"""What this process counts: a rank is one process."""
