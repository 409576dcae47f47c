"""The requests that wait, the one that runs, and how the last ones ended."""

import logging
import socket
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..errors import BackendError, InvalidRequest, QueueFull
from ..layout.parallel_layout import ParallelLayout, auto
from ..layout.suggestions import check_fits
from ..protocol import frames, rank_control
from ..protocol.messages import Devices, Done, Error, Progress, RankRequest
from .event_loop import HANG_UP, EventLoop
from .listener import answer

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class QueuedRequest:
    """A request on its way, with its client's connection.

    ``cancelled`` is when its cancel was asked for. ``dissent`` is when which rank ended it by itself, and how.
    """

    request: RankRequest
    header: bytes
    connection: socket.socket
    devices: Devices
    cancelled: float | None = None
    dissent: tuple[float, int, rank_control.Finished] | None = None

    @property
    def id(self) -> str:
        """The request's id."""
        return self.request.request_id

    @property
    def layout(self) -> ParallelLayout | None:
        """How the ranks will split it, as far as the request says."""
        branches = getattr(self.request, "branches", None)
        if self.request.model.layout or branches is None:
            return self.request.model.layout
        return auto(len(self.devices.indices), branches=branches)


class RequestQueue:
    """A bounded queue. ``on_hang_up`` is called with the job whose client went away."""

    def __init__(
        self, *, size: int, outcomes: int, events: EventLoop, on_hang_up: Callable[[QueuedRequest], None]
    ) -> None:
        self._size, self._kept, self._events, self._on_hang_up = size, outcomes, events, on_hang_up
        self._waiting: deque[QueuedRequest] = deque()
        self._outcomes: OrderedDict[str, Done | Error] = OrderedDict()
        self.running: QueuedRequest | None = None
        self.used = time.monotonic()

    def add(self, sock: socket.socket, frame: frames.Frame) -> QueuedRequest:
        """Queue a request.

        Raises:
            QueueFull: too many wait.
            InvalidRequest: it can be seen without a rank that it cannot work.
        """
        if len(self._waiting) >= self._size:
            raise QueueFull(f"{len(self._waiting)} requests wait already: try again when some are done")
        devices = needed(frame.message)
        header = frames.pack(frame)[frames.PREFIX.size :]
        job = QueuedRequest(request=frame.message, header=header, connection=sock, devices=devices)
        self._waiting.append(job)
        self._events.watch(sock.fileno(), HANG_UP, lambda: self._hung_up(job))
        self._sign_of_life(job, "accepted")
        return job

    def _hung_up(self, job: QueuedRequest) -> None:
        self._events.forget(job.connection.fileno())
        self._on_hang_up(job)

    @property
    def first(self) -> QueuedRequest | None:
        """The request whose turn is next."""
        return self._waiting[0] if self._waiting else None

    @property
    def waiting(self) -> tuple[QueuedRequest, ...]:
        """Those whose turn has not come, in order."""
        return tuple(self._waiting)

    def take(self) -> QueuedRequest:
        """Let the first one run."""
        self.running = self._waiting.popleft()
        return self.running

    def settle(self, job: QueuedRequest, outcome: BackendError | Error | Done) -> None:
        """End a job that has not run, and tell its client."""
        if isinstance(outcome, BackendError):
            outcome = Error(code=outcome.code, message=str(outcome))
        self._waiting.remove(job)
        answer(job.connection, outcome)
        self._close(job, outcome)

    def finish(self, outcome: Done | Error, *, answered: bool) -> None:
        """End the running job. A client that rank 0 has not answered is cut off, and will ask for the outcome."""
        job, self.running = self.running, None
        if job:
            if not answered:
                _cut(job)
            self._close(job, outcome)

    def _close(self, job: QueuedRequest, outcome: Done | Error) -> None:
        self.used = time.monotonic()
        self._outcomes[job.id] = outcome
        while len(self._outcomes) > self._kept:
            self._outcomes.popitem(last=False)
        self._events.forget(job.connection.fileno())
        job.connection.close()

    def outcome(self, request_id: str) -> Done | Error:
        """How a request ended."""
        unknown = Error(code="failure", message=f"the backend does not know how request {request_id} ended")
        return self._outcomes.get(request_id, unknown)

    def signs_of_life(self) -> None:
        """Tell all who wait that they are not forgotten."""
        for job in self._waiting:
            self._sign_of_life(job, "start")

    def _sign_of_life(self, job: QueuedRequest, next_in_turn: str) -> None:
        """Say how many are ahead, or ``next_in_turn`` when none is: soon after, only starting ranks take time."""
        ahead = self._waiting.index(job) + (self.running is not None)
        answer(job.connection, Progress(phase="queued" if ahead else next_in_turn, value=0, total=max(1, ahead)))


def needed(request: RankRequest) -> Devices:
    """The devices of a request: those its layout uses, or all.

    Raises:
        InvalidRequest: there are none, or fewer than the layout needs.
    """
    spec = request.model
    if not spec.devices.indices:
        raise InvalidRequest("no device was given: name at least one")
    if spec.layout is None:
        return spec.devices
    check_fits(spec.layout, len(spec.devices.indices))
    return replace(spec.devices, indices=spec.devices.indices[: spec.layout.ranks])


def _cut(job: QueuedRequest) -> None:
    """Shut the connection down for everyone who holds a descriptor of it."""
    try:
        job.connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        log.info("the client of request %s was gone before it failed", job.id)
