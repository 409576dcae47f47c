"""What happens when a request fails: one loop asks again until there is an answer, or until it makes no sense.

=============================================  ====================================  ===============================
failure                                        what follows                          when it is an error
=============================================  ====================================  ===============================
the backend was about to end: it did not       asked every ``POLL`` seconds          after ``timeouts.start``, or if
accept the request                                                                   the extension's files changed
a rank died, hung or raised; the backend gave  asked again                           twice at the same step
a process up that stood still
the backend ended and nobody told it to, or    asked again                           twice at the same step
this process stood still (``STOOD_STILL``)
ranks do not start, after an earlier failure   asked again without their devices     twice; no device is left
ranks here do not start, before any failure                                          at once
ranks of hosts that are gone do not start      asked again without their devices     nothing changes by that
the queue is full, and work would be lost      asked every ``BUSY_POLL`` seconds     after ``timeouts.silence``
out of memory                                  the next of ``MemoryLadder``          none is left: the first error
anything else                                                                        at once
=============================================  ====================================  ===============================

Without a ``Recovery`` only the first row holds. The user reads what is done and why, except about waits. After each
step of a ``Sample``, rank 0 sends what the next step begins with, and this process keeps the newest: asked again, it
goes on from there, also in another layout. Any other request starts from the beginning.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

from ..errors import BackendError, BackendUnavailable, Cancelled, ClientStalled, OutOfMemory, QueueFull, RankFailed
from ..protocol.deadlines import Deadline
from ..protocol.endpoint import Endpoint
from ..protocol.fingerprint import is_outdated
from ..protocol.messages import HISTORY, KEPT, Progress, RankRequest, Sample, new_id
from ..protocol.model_spec import FIRST, ModelSpec
from .exchange import POLL, Interrupted, NotAccepted, OnProgress, Timeouts, ignore, never
from .lost_devices import KnowsHosts, LostDevices
from .memory_ladder import FreeMemory, MemoryLadder, SettledLayouts

log = logging.getLogger(__name__)

BUSY_POLL = 1.0
"""Seconds between two attempts to get into a full queue."""
STOOD_STILL = 60.0
"""Seconds without a sign of life of this process after which the backend may have given its request up."""


class Attempts(KnowsHosts, Protocol):
    """The part of a ``Client`` that tries a request once."""

    endpoint: Endpoint
    timeouts: Timeouts

    def attempt(
        self, message: RankRequest, tensors: Mapping[str, Tensor], *, interrupted: Interrupted, on_progress: OnProgress
    ) -> dict[str, Tensor]:
        """See ``Client``."""


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """What a request may do about failures.

    Attributes:
        notify: takes a sentence about each recovery, for the user.
        lost: devices to skip.
        layouts: layouts to begin with.
        free_memory: see ``memory_ladder``.
    """

    notify: Callable[[str], None] = log.warning
    lost: LostDevices = field(default_factory=LostDevices)
    layouts: SettledLayouts = field(default_factory=SettledLayouts)
    free_memory: FreeMemory | None = None


class RetriedRequest:
    """One request, asked again when it fails.

    Args:
        client: tries it.
        message: the request.
        tensors: its tensors.
        interrupted: see ``Client.call``.
        on_progress: see ``Client.call``. It does not get the tensors that are kept for a recovery.
        recovery: None asks again only while no backend has accepted the request.
    """

    def __init__(
        self,
        client: Attempts,
        message: RankRequest,
        tensors: Mapping[str, Tensor],
        *,
        interrupted: Interrupted = never,
        on_progress: OnProgress = ignore,
        recovery: Recovery | None = None,
    ) -> None:
        self._client, self._tensors = client, dict(tensors)
        self._interrupted, self._on_progress = interrupted, on_progress
        self._recovers, self._recovery = recovery is not None, recovery or Recovery()
        self._ladder = MemoryLadder(message, self._recovery.layouts, self._recovery.free_memory)
        self._message = self._ladder.first_try() if recovery else message
        if recovery and isinstance(self._message, Sample):
            self._message = replace(self._message, keep=True)
        self._begun = self._lost_some = False
        self._note = ""
        self._failed_at: int | None = None
        self._queueing: Deadline | None = None
        self._last_alive, self._stood_still = time.monotonic(), False

    def run(self) -> dict[str, Tensor]:
        """Return the reply's tensors.

        Raises:
            BackendError: see ``Client.call``, and the table above.
        """
        client, place, accepting = self._client, self._client.endpoint.log_place, None
        while True:
            accepting = accepting or Deadline(client.timeouts.start, f"finding a backend that stays ({place})")
            self._live()
            self._begun = self._stood_still = False
            asked = self._next()
            try:
                results = client.attempt(asked, self._tensors, interrupted=self._poll, on_progress=self._progressed)
            except NotAccepted:
                self._wait_for_backend(accepting)
                continue
            except BackendError as error:
                if not self._recovers:
                    raise
                self._prepare(error, asked.model)
                accepting = None
            else:
                self._ladder.settle()
                return results

    def _prepare(self, error: BackendError, spec: ModelSpec) -> None:
        """Prepare to ask again after an error with ``spec``, or raise the error."""
        match error:
            case RankFailed() | ClientStalled():
                self._recover(error, spec)
            case BackendUnavailable() if self._broke_off():
                self._recover(error, spec)
            case QueueFull() if self._failed_at is not None or self._step:
                self._wait_for_room()
            case OutOfMemory():
                action, options = self._ladder.take(error.with_traceback(None))  # which would keep the tensors
                self._message = replace(self._message, **options)
                self._recovery.notify(f"{action}, since {error}")
            case _:
                raise error

    def _next(self) -> RankRequest:
        """Return the request for the next attempt."""
        if not self._recovers:
            return self._message
        self._recovery.lost.try_hosts_again(self._client)
        return replace(self._message, model=self._recovery.lost.without(self._message.model), request_id=new_id())

    @property
    def _step(self) -> int:
        """Steps that need not run again."""
        return self._message.first_step if isinstance(self._message, Sample) else 0

    def _progressed(self, progress: Progress, tensors: dict[str, Tensor]) -> None:
        self._live()
        self._begun, self._queueing = True, None
        kept = {name: tensors.pop(name) for name in list(tensors) if name.startswith(KEPT)} if self._recovers else {}
        if kept:
            rest = {name: tensor for name, tensor in self._tensors.items() if not name.startswith(HISTORY)}
            self._tensors = rest | {name.removeprefix(KEPT): tensor for name, tensor in kept.items()}
            changes: dict[str, Any] = {"first_step": progress.value}
            self._message = replace(self._message, **changes)
        notes = [note for note in (progress.note, self._note) if note]
        self._on_progress(replace(progress, note=", ".join(notes)), tensors)

    def _poll(self) -> bool:
        self._live()
        return self._interrupted()

    def _live(self) -> None:
        """Record that this process runs, and whether it was suspended."""
        now = time.monotonic()
        self._stood_still = self._stood_still or now - self._last_alive > STOOD_STILL
        self._last_alive = now

    def _wait_for_backend(self, deadline: Deadline) -> None:
        """Wait a moment: the backend was shutting down, because it was idle or runs older code than this process."""
        remote = self._client.endpoint.remote
        if remote and remote.closed:
            raise BackendUnavailable(remote.closed)
        if is_outdated():
            raise BackendUnavailable("the extension's files have changed since ComfyUI started: restart ComfyUI")
        time.sleep(min(deadline.remaining(), POLL))

    def _wait_for_room(self) -> None:
        """Wait a moment: others have filled the queue while this request recovered."""
        phase = "waiting for room in the queue to go on"
        self._queueing = self._queueing or Deadline(self._client.timeouts.silence, phase)
        end = time.monotonic() + min(BUSY_POLL, self._queueing.remaining())
        while time.monotonic() < end:
            if self._poll():
                raise Cancelled("the request was cancelled")
            time.sleep(POLL)

    def _broke_off(self) -> bool:
        """Whether the backend ended during the request without being told to.

        A backend that is told to end, or is idle, removes its socket. On another machine that cannot be seen.
        """
        self._live()
        endpoint = self._client.endpoint
        return self._begun and (self._stood_still or endpoint.remote is not None or endpoint.socket.exists())

    def _recover(self, error: BackendError, spec: ModelSpec) -> None:
        """Prepare to go on with other ranks, or raise the error."""
        lost, ranks = self._recovery.lost, len(spec.devices.indices)
        # The set may have more ranks than this request needs.
        not_started = [rank for rank in getattr(error, "not_started", ()) if rank < ranks]
        here = any(spec.devices.host_of(rank) == FIRST for rank in not_started)
        missing = lost.add_missing_hosts(spec.devices, not_started, self._client)
        if missing and not here and lost.without(self._message.model) != spec:
            pass
        elif not_started and self._failed_at is not None and not self._lost_some and len(not_started) < ranks:
            lost.add(spec.devices, not_started)
            self._lost_some = True  # a second failure has another cause than a lost device
        elif here or self._failed_at == self._step:
            raise error
        else:
            self._failed_at = self._step
        self._tell(error, lost.without(self._message.model))

    def _tell(self, error: BackendError, spec: ModelSpec) -> None:
        where = "asking again"
        if self._step:
            where = self._note = f"going on after step {self._step}"
            if spec.layout and spec.layout.approximate:
                where += ", with a step of warm-up"
            if isinstance(self._message, Sample) and self._message.cache:
                where += ", where the step cache begins anew"
        if len(spec.devices.indices) < len(self._message.model.devices.indices):
            where += f", on {spec.devices}" + (f" with layout {spec.layout}" if spec.layout else "")
        self._recovery.notify(f"{where}, since {error}")
