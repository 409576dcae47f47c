"""The queued requests, the running one, and the outcomes of the last ones."""

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
    """A queued or running request.

    Attributes:
        message: the client's message.
        header: its encoded header.
        connection: its client's connection.
        devices: those that it runs on.
        cancelled_at: when it was cancelled, if it was.
        dissent: when a rank other than 0 ended it with an error, that rank's number, and how.
    """

    message: RankRequest
    header: bytes
    connection: socket.socket
    devices: Devices
    cancelled_at: float | None = None
    dissent: tuple[float, int, rank_control.Finished] | None = None

    @property
    def id(self) -> str:
        """The request's id."""
        return self.message.request_id

    @property
    def layout(self) -> ParallelLayout | None:
        """The layout that it will run in, None if that does not follow from the request alone."""
        branches = getattr(self.message, "branches", None)
        if self.message.model.layout or branches is None:
            return self.message.model.layout
        return auto(len(self.devices.indices), branches=branches)


class RequestQueue:
    """A bounded queue, the running request and the last outcomes.

    Args:
        size: how many requests may be queued.
        outcomes: how many outcomes are remembered.
        events: the supervisor's event loop.
        on_hang_up: called with a request whose client has hung up.

    Attributes:
        running: the request that the ranks run, if there is one.
        last_used: when the last request ended.
    """

    def __init__(
        self, *, size: int, outcomes: int, events: EventLoop, on_hang_up: Callable[[QueuedRequest], None]
    ) -> None:
        self._size, self._max_outcomes, self._events, self._on_hang_up = size, outcomes, events, on_hang_up
        self._queued: deque[QueuedRequest] = deque()
        self._outcomes: OrderedDict[str, Done | Error] = OrderedDict()
        self.running: QueuedRequest | None = None
        self.last_used = time.monotonic()

    def add(self, sock: socket.socket, frame: frames.Frame) -> QueuedRequest:
        """Queue a request.

        Raises:
            QueueFull: the queue is full.
            InvalidRequest: the request's devices and layout do not fit.
        """
        if len(self._queued) >= self._size:
            raise QueueFull(f"{len(self._queued)} requests are already queued: try again when some have finished")
        devices = devices_for(frame.message)
        header = frames.pack(frame)[frames.PREFIX.size :]
        request = QueuedRequest(message=frame.message, header=header, connection=sock, devices=devices)
        self._queued.append(request)
        self._events.watch(sock.fileno(), HANG_UP, lambda: self._hung_up(request))
        self._sign_of_life(request, "accepted")
        return request

    def _hung_up(self, request: QueuedRequest) -> None:
        self._events.forget(request.connection.fileno())
        self._on_hang_up(request)

    @property
    def first(self) -> QueuedRequest | None:
        """The request that runs next."""
        return self._queued[0] if self._queued else None

    @property
    def queued(self) -> tuple[QueuedRequest, ...]:
        """The queued requests, in order."""
        return tuple(self._queued)

    def take(self) -> QueuedRequest:
        """Make the first queued request the running one."""
        self.running = self._queued.popleft()
        return self.running

    def end_queued(self, request: QueuedRequest, outcome: BackendError | Error | Done) -> None:
        """End a queued request without running it, and answer its client."""
        if isinstance(outcome, BackendError):
            outcome = Error(code=outcome.code, message=str(outcome))
        self._queued.remove(request)
        answer(request.connection, outcome)
        self._close(request, outcome)

    def end_running(self, outcome: Done | Error, *, answered: bool) -> None:
        """End the running request.

        If rank 0 has not ``answered`` its client, the connection is shut down, and the client asks for the outcome.
        """
        request, self.running = self.running, None
        if request:
            if not answered:
                _shut_down(request)
            self._close(request, outcome)

    def _close(self, request: QueuedRequest, outcome: Done | Error) -> None:
        self.last_used = time.monotonic()
        self._outcomes[request.id] = outcome
        while len(self._outcomes) > self._max_outcomes:
            self._outcomes.popitem(last=False)
        self._events.forget(request.connection.fileno())
        request.connection.close()

    def outcome(self, request_id: str) -> Done | Error:
        """How a request ended, as far as the queue remembers."""
        unknown = Error(code="failure", message=f"the backend does not know how request {request_id} ended")
        return self._outcomes.get(request_id, unknown)

    def signs_of_life(self) -> None:
        """Send a sign of life to the clients of all queued requests."""
        for request in self._queued:
            self._sign_of_life(request, "start")

    def _sign_of_life(self, request: QueuedRequest, first_phase: str) -> None:
        """Report how many requests are ahead, or ``first_phase`` if none are: then only the ranks have to start."""
        ahead = self._queued.index(request) + (self.running is not None)
        answer(request.connection, Progress(phase="queued" if ahead else first_phase, value=0, total=max(1, ahead)))


def devices_for(request: RankRequest) -> Devices:
    """The devices that a request runs on: as many as its layout has ranks, or all.

    Raises:
        InvalidRequest: the request names no device, or fewer than its layout needs.
    """
    spec = request.model
    if not spec.devices.indices:
        raise InvalidRequest("the request names no device: name at least one")
    if spec.layout is None:
        return spec.devices
    check_fits(spec.layout, len(spec.devices.indices))
    return replace(spec.devices, indices=spec.devices.indices[: spec.layout.ranks])


def _shut_down(request: QueuedRequest) -> None:
    """Shut a connection down in all processes that hold a descriptor of it."""
    try:
        request.connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        log.info("the client of request %s hung up before it failed", request.id)
