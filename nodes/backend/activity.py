"""What the backend does for this ComfyUI, for the panel: steps and how long they take, and the last failure."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ...parallel_backend.errors import BackendError
from ...parallel_backend.protocol.model_spec import ModelSpec
from ...parallel_backend.protocol.origin import MAX_NAME, Origin

HISTORY = 60
"""Steps whose times are kept."""


@dataclass(frozen=True, kw_only=True)
class Trouble:
    """A failure, or what was done about one.

    Attributes:
        text: the sentence that the user reads.
        code: of ``errors``; "" for a recovery.
        origin: the node that it happened to.
        at: seconds since 1970.
    """

    text: str
    code: str
    origin: Origin | None
    at: float


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Progress of a sampling.

    Attributes:
        origin: the node that samples.
        done: steps that are done.
        total: all steps; 0 if it is not known.
        seconds: how long each of the last steps took, the oldest first.
    """

    origin: Origin | None = None
    done: float = 0
    total: float = 0
    seconds: tuple[float, ...] = ()

    @property
    def left(self) -> float | None:
        """Seconds that the other steps will take; None if that is not known."""
        return max(0.0, self.total - self.done) * self.usual if self.seconds and self.total else None

    @property
    def usual(self) -> float:
        """Seconds that one of the last steps took, the middle of five; 0 before the first."""
        recent = sorted(self.seconds[-5:])
        return recent[len(recent) // 2] if recent else 0.0


class Activity:
    """Filled by the prompt's thread, read by others.

    Args:
        clock: returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._steps, self._at = Steps(), 0.0
        self._trouble: Trouble | None = None
        self._reasons: dict[ModelSpec | None, str] = {}
        self._planned: ModelSpec | None = None

    @property
    def steps(self) -> Steps:
        """The running or the last sampling."""
        with self._lock:
            return self._steps

    @property
    def trouble(self) -> Trouble | None:
        """The last failure or recovery."""
        with self._lock:
            return self._trouble

    @property
    def reason(self) -> str:
        """Why the last sampling has its layout, in a sentence; "" if no plan chose it."""
        with self._lock:
            return self._reasons.get(self._planned, "") if self._planned else ""

    def planning(self, model: ModelSpec) -> None:
        """Note which model a sampling has. What has been planned for it holds until there is another plan."""
        with self._lock:
            self._planned = model if model.mode and not model.layout else None

    def planned(self, reason: str) -> None:
        """Note why the sampling has its layout."""
        with self._lock:
            self._reasons[self._planned] = reason

    def progressed(self, origin: Origin | None, done: float, total: float) -> None:
        """Note how many steps are done. The time since the last one counts if the same node goes on."""
        now = self._clock()
        with self._lock:
            last, passed = self._steps, now - self._at
            goes_on = origin == last.origin and last.total == total and done >= last.done
            if goes_on and done == last.done:
                return
            seconds = last.seconds if origin == last.origin else ()
            if goes_on:
                seconds = (*seconds, passed / (done - last.done))[-HISTORY:]
            self._steps, self._at = Steps(origin=origin, done=done, total=total, seconds=seconds), now

    def failed(self, origin: Origin | None, error: BackendError) -> None:
        """Note a failure."""
        self._note(Trouble(text=str(error), code=error.code, origin=origin, at=time.time()))

    def recovered(self, origin: Origin | None, sentence: str) -> None:
        """Note what was done about a failure."""
        self._note(Trouble(text=sentence, code="", origin=origin, at=time.time()))

    def _note(self, trouble: Trouble) -> None:
        with self._lock:
            self._trouble = trouble


def named(prompt: str, node: str) -> Origin:
    """Return the origin with these names, without what a name cannot have: prompts are named by their clients."""
    kept = ("".join(filter(str.isprintable, name))[:MAX_NAME] for name in (prompt, node))
    return Origin(prompt=next(kept), node=next(kept))
