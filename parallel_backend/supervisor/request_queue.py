"""The queue, the running request and the most recent outcomes."""

import logging
import socket
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..errors import BackendError, InvalidRequest, QueueFull
from ..layout.choice import auto
from ..layout.parallel_layout import ParallelLayout
from ..layout.suggestions import check_fits
from ..protocol import frames, rank_control
from ..protocol.messages import Done, Error, Progress, RankRequest
from ..protocol.model_spec import Devices, ModelSpec
from ..protocol.status import LoadedModel
from .event_loop import DISCONNECT, EventLoop
from .listener import answer

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EarlyFailure:
    """The failure of a rank other than 0 while rank 0 still runs the request.

    Attributes:
        at: ``time.monotonic()`` when the supervisor read the report.
        rank: the rank that failed.
        finished: the rank's report.
    """

    at: float
    rank: int
    finished: rank_control.Finished


@dataclass(kw_only=True)
class QueuedRequest:
    """A queued or running request.

    Attributes:
        message: the client's message.
        header: its encoded header.
        connection: its client's connection.
        metas: of the tensors that follow the header.
        devices: the devices that it runs on.
        queued_at: ``time.monotonic()`` of its arrival.
        first_at: when it was next while the ranks were not ready; None if they were ready.
        ran_at: when it was sent to the ranks; None before that.
        finished: rank 0's report of its end; None before that.
        cancelled_at: ``time.monotonic()`` of the cancellation; None if not cancelled.
        ended_on: the other ranks that ended it before rank 0.
        early_failure: the failure that another rank reported while rank 0 was still running; None without one.
        gives_way: whether rank 0 knows that another request waits.
        note: a note for its client while ranks start.
    """

    message: RankRequest
    header: bytes
    connection: socket.socket
    metas: tuple[frames.TensorMeta, ...]
    devices: Devices
    queued_at: float = field(default_factory=time.monotonic)
    first_at: float | None = None
    ran_at: float | None = None
    finished: rank_control.Finished | None = None
    cancelled_at: float | None = None
    ended_on: set[int] = field(default_factory=set)
    early_failure: EarlyFailure | None = None
    gives_way: bool = False
    note: str = ""

    @property
    def id(self) -> str:
        """The request's id."""
        return self.message.request_id

    @property
    def layout(self) -> ParallelLayout | None:
        """The layout that the request will run in; None if the request alone does not determine it."""
        branches = getattr(self.message, "branches", None)
        if self.message.model.layout or branches is None:
            return self.message.model.layout
        return auto(self.devices.host_sizes, branches=branches)


def chosen_layout(spec: ModelSpec, models: Sequence[LoadedModel]) -> ParallelLayout | None:
    """Return the layout that a model's spec names, or that ``models`` of rank 0 say the ranks chose for it.

    They choose by the model and by the room on their devices.
    """
    if spec.layout:
        return spec.layout
    return next((each.layout for each in models if (each.path, each.stamp) == (spec.path, spec.stamp)), None)


class RequestQueue:
    """A bounded queue, the running request and the most recent outcomes.

    Args:
        size: how many requests may be queued.
        outcomes: how many outcomes are remembered.
        events: the supervisor's event loop.
        on_disconnect: called with a request whose client has disconnected.
        on_end: called with each request that has ended, and how it ended.

    Attributes:
        running: the request that the ranks run, if there is one.
    """

    def __init__(
        self,
        *,
        size: int,
        outcomes: int,
        events: EventLoop,
        on_disconnect: Callable[[QueuedRequest], None],
        on_end: Callable[[QueuedRequest, Done | Error], None],
    ) -> None:
        self._size, self._max_outcomes, self._events = size, outcomes, events
        self._on_disconnect, self._on_end = on_disconnect, on_end
        self._queued: deque[QueuedRequest] = deque()
        self._outcomes: OrderedDict[str, Done | Error] = OrderedDict()
        self.running: QueuedRequest | None = None
        self._last_used = time.monotonic()

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
        request = QueuedRequest(
            message=frame.message, header=header, connection=sock, metas=frame.tensors, devices=devices
        )
        self._queued.append(request)
        self._events.watch(
            sock.fileno(),
            DISCONNECT,
            lambda: self._disconnected(request),
            discard=lambda error: self._on_disconnect(request),
        )
        self._send_progress(request, phase_if_first="accepted")
        return request

    def _disconnected(self, request: QueuedRequest) -> None:
        self._events.forget(request.connection.fileno())
        self._on_disconnect(request)

    @property
    def first(self) -> QueuedRequest | None:
        """The request that runs next."""
        return self._queued[0] if self._queued else None

    @property
    def busy(self) -> bool:
        """Whether a request runs or waits."""
        return bool(self.running or self._queued)

    @property
    def queued(self) -> tuple[QueuedRequest, ...]:
        """The queued requests, in order."""
        return tuple(self._queued)

    def unused_for(self, now: float) -> float:
        """Seconds since the last request ended, the last ``touch`` or the start; 0 while a request runs or waits."""
        return 0.0 if self.running or self._queued else now - self._last_used

    def touch(self) -> None:
        """Count as unused only from now on: a request comes soon."""
        self._last_used = time.monotonic()

    def take(self) -> QueuedRequest:
        """Make the first queued request the running one."""
        self.running = self._queued.popleft()
        self.running.ran_at = time.monotonic()
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
        self.touch()
        self._on_end(request, outcome)
        self._outcomes[request.id] = outcome
        while len(self._outcomes) > self._max_outcomes:
            self._outcomes.popitem(last=False)
        self._events.forget(request.connection.fileno())
        request.connection.close()

    def outcome(self, request_id: str) -> Done | Error:
        """How a request ended, as far as the queue remembers."""
        unknown = Error(code="failure", message=f"the backend does not know how request {request_id} ended")
        return self._outcomes.get(request_id, unknown)

    def send_keepalives(self) -> None:
        """Send a keepalive to the clients of all queued requests."""
        for request in self._queued:
            self._send_progress(request, phase_if_first="start")

    def tell(self, request: QueuedRequest, note: str) -> None:
        """Send a note about the starting ranks to the client of the first queued request."""
        request.note = note
        self._send_progress(request, phase_if_first="start")

    def _send_progress(self, request: QueuedRequest, *, phase_if_first: str) -> None:
        """Tell the client how many requests are ahead.

        If it is the first, report ``phase_if_first`` instead: it waits only for the ranks to start.
        """
        ahead = self._queued.index(request) + (self.running is not None)
        phase, note = ("queued", "") if ahead else (phase_if_first, request.note)
        answer(request.connection, Progress(phase=phase, value=0, total=max(1, ahead), note=note))


def devices_for(request: RankRequest) -> Devices:
    """The devices for a request: one for each rank of its layout, or all.

    Raises:
        InvalidRequest: the request names no device, or fewer than its layout needs.
    """
    spec = request.model
    if not spec.devices.indices:
        raise InvalidRequest("the request names no device: name at least one")
    if spec.layout is None:
        return spec.devices
    check_fits(spec.layout, len(spec.devices.indices))
    return spec.devices.first(spec.layout.ranks)


def _shut_down(request: QueuedRequest) -> None:
    """Shut a connection down in all processes that hold a descriptor of it."""
    try:
        request.connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        log.info("client of request %s had already disconnected when the request ended", request.id)
