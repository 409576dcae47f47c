"""Runs queued requests on ranks, one at a time, and ends the ranks that fail."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import BackendFailure, Cancelled, RankFailed
from ..layout.parallel_layout import ParallelLayout
from ..protocol import rank_control
from ..protocol.messages import Done, Error, Forward, Unload
from ..protocol.model_spec import Devices, ModelSpec
from ..protocol.status import RankStatus
from .event_loop import EventLoop
from .limits import Limits
from .overdue import overdue
from .ranks.failures import STUCK, Failure
from .ranks.generations import Generations
from .ranks.rank_start import NotStarted
from .request_queue import EarlyFailure, QueuedRequest, RequestQueue, chosen_layout

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Unsettled:
    """A request that rank 0 ended without a result while other ranks may still wait in a collective.

    Another request that began now might meet them there.

    Attributes:
        id: the request.
        outcome: rank 0's report.
        waiting: the ranks that have not ended it.
        since: ``time.monotonic()`` when rank 0 ended it.
    """

    id: str
    outcome: str
    waiting: set[int]
    since: float


class RequestRunner:
    """Takes requests from the queue and gives them to the current set of ranks.

    Args:
        queue: the queued requests.
        generations: the sets of ranks.
        limits: how long a request may take to end.
        events: the supervisor's event loop.
        may_start: whether another request may begin.

    Attributes:
        layout: the newest layout of a request.
    """

    def __init__(
        self,
        *,
        queue: RequestQueue,
        generations: Generations,
        limits: Limits,
        events: EventLoop,
        may_start: Callable[[], bool],
    ) -> None:
        self._queue, self._generations, self._limits = queue, generations, limits
        self._events, self._may_start = events, may_start
        self._latest: tuple[ModelSpec, ParallelLayout] | None = None
        self._unsettled: _Unsettled | None = None

    def layout(self, ranks: Sequence[RankStatus]) -> ParallelLayout | None:
        """Return the layout of the running request, or of the latest that had one. None before the first."""
        if self._latest is None:
            return None
        spec, layout = self._latest
        return chosen_layout(spec, ranks[0].models if ranks else ()) or layout

    @property
    def settling(self) -> bool:
        """Whether ranks have not ended a request that rank 0 has ended."""
        return self._unsettled is not None

    def guard(self, step: Callable[[], None]) -> None:
        """Take a step for the current request. An exception ends only that request and its ranks."""
        try:
            step()
        except Exception as error:
            first = self._queue.first
            if not (self._queue.running or first or self._generations.current):
                raise  # no client is the cause
            self._events.count(error)
            failed = Error(code=BackendFailure.code, message=f"the backend failed: {type(error).__name__}: {error}")
            self._fail_ranks(failed)
            if first and first in self._queue.queued:
                self._queue.end_queued(first, failed)

    def run_next(self) -> None:
        """Send the next request to its ranks if nothing runs and they are ready; start them if they are not there."""
        request = self._queue.first
        if request is None or not self._may_start():
            return
        if self._queue.running:
            self._ask_to_give_way(self._queue.running)
            return
        covered = self._generations.current is not None and self._generations.current.covers(request.devices)
        if isinstance(request.message, Unload) and not covered:
            # No rank holds the model, so there is nothing to free, and no reason to start or kill ranks.
            self._queue.end_queued(request, Done())
            self.run_next()
            return
        if covered and self._unsettled:
            return
        if not (covered and self._generations.current and self._generations.current.ready):
            request.first_at = request.first_at or time.monotonic()
        if not covered:
            if self._generations.current is not None:
                self._say_why(self._generations.current.devices, request)
            self._generations.kill()
            self._unsettled = None
        if self._generations.current is None:
            self._start_ranks(request.devices)
        elif self._generations.current.ready:
            self._queue.take()
            self._latest = (request.message.model, request.layout) if request.layout else self._latest
            self._generations.current.run(request.header, request.connection)

    def _ask_to_give_way(self, running: QueuedRequest) -> None:
        """Tell rank 0 once that another request waits, so that it does not wait for further steps of this one."""
        has_steps = isinstance(running.message, Forward) and running.message.steps
        if has_steps and not running.gives_way and self._generations.current:
            running.gives_way = True
            self._generations.current.give_way(running.id)

    def _say_why(self, running: Devices, request: QueuedRequest) -> None:
        """Tell the client why ranks end and others start, which takes seconds and reads the weights again."""
        note = f"the ranks end, and others start: {_difference(running, request.devices)}"
        log.info("request %s: %s", request.id, note)
        self._queue.tell(request, note)

    def _start_ranks(self, devices: Devices) -> None:
        try:
            self._generations.start(devices)
        except OSError as error:
            ranks = error.ranks if isinstance(error, NotStarted) else tuple(range(len(devices.indices)))
            message = f"the ranks do not start: {error}"
            self._fail_ranks(Error(code=RankFailed.code, message=message, not_started=ranks))

    def cancel(self, request_id: str) -> None:
        """Cancel a request, whether it is queued or runs."""
        running = self._queue.running
        if running and running.id == request_id and running.cancelled_at is None and self._generations.current:
            running.cancelled_at = time.monotonic()
            self._generations.current.cancel(request_id)
        for request in self._queue.queued:
            if request.id == request_id:
                self._queue.end_queued(request, Cancelled("the request was cancelled before it ran"))

    def finish(self, rank: int, finished: rank_control.Finished) -> None:
        """Take a rank's report about the end of a request."""
        request, current = self._queue.running, self._generations.current
        if current is None:
            return
        if finished.code not in rank_control.RECOVERABLE:
            # Even after rank 0 has answered, since this rank will run nothing more.
            current.record_error(rank, finished)
        elif self._unsettled and finished.request_id == self._unsettled.id:
            self._unsettled.waiting.discard(rank)
            self._settle()
        elif request is None or finished.request_id != request.id:
            return
        elif rank == 0:
            self._end(request, finished, set(range(1, len(current.ranks))))
        else:
            request.ended_on.add(rank)
            if finished.code != rank_control.DONE:
                request.early_failure = EarlyFailure(at=time.monotonic(), rank=rank, finished=finished)

    def _end(self, request: QueuedRequest, finished: rank_control.Finished, others: set[int]) -> None:
        """End the running request as rank 0 says."""
        request.finished = finished
        if finished.code == rank_control.DONE:
            self._queue.end_running(Done(), answered=True)
        else:
            self._queue.end_running(Error(code=finished.code, message=finished.message), answered=True)
            waiting = set() if finished.unheard else others - request.ended_on
            self._unsettled = _Unsettled(
                id=request.id, outcome=finished.message, waiting=waiting, since=time.monotonic()
            )
        self._settle()

    def _settle(self) -> None:
        """Go on with the next request, unless ranks have not ended the last one."""
        if self._unsettled and not self._unsettled.waiting:
            self._unsettled = None
        self.run_next()

    def check_ranks(self) -> None:
        """Kill the ranks if one of them has failed, or if they do not end the running request."""
        failure = self._generations.current.verdict() if self._generations.current else None
        if self._queue.running and (failure is None or failure.kind == STUCK):
            failure = overdue(self._queue.running, self._limits, stuck=failure is not None) or failure
        left = self._unsettled
        if left and failure is None and time.monotonic() - left.since > self._limits.settle:
            message = f"rank {min(left.waiting)} has not ended a request that rank 0 has ended: {left.outcome}"
            failure = Failure(message=message)
        if failure:
            self._fail_ranks(Error(code=failure.code, message=failure.message, not_started=failure.not_started))

    def _fail_ranks(self, error: Error) -> None:
        if self._queue.running and self._queue.running.cancelled_at:  # or its client would go on with it
            error = Error(code=Cancelled.code, message=f"the request was cancelled, and then {error.message}")
        log.error("killing generation %d: %s", self._generations.number, error.message)
        current = self._generations.current
        # Spare ranks may have died unnoticed, or have failed in a way that new processes do not.
        may_retry = bool(current and (current.ready or current.uses_spares))
        self._generations.kill()
        self._unsettled = None
        first = self._queue.first
        if self._queue.running:
            self._queue.end_running(error, answered=False)
        elif first and not may_retry:
            self._queue.end_queued(first, error)


def _difference(running: Devices, wanted: Devices) -> str:
    """Return why a set of ranks cannot serve a request for other devices."""
    if running.kind != wanted.kind:
        return f"they are {running}, and this request names {wanted}"
    if running.visible != wanted.visible:
        seen = [" ".join(f"{name}={value}" for name, value in each.visible) or "all" for each in (running, wanted)]
        return f"they see the GPUs of {seen[0]}, and this request comes from a process that sees those of {seen[1]}"
    if running.listed == wanted.listed:
        return f"they communicate by {running.collectives}, and this request names {wanted.collectives}"
    return (
        f"they run on {running.listed}, and this request names {wanted.listed}: one set of ranks serves several models "
        "only if the list of each model is the beginning of the longest one, as 0 is of 0,1"
    )
