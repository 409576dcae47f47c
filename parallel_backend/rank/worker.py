"""The request loop of one rank, which runs until the supervisor kills the process.

Rank 0 gets requests from the supervisor and forwards each one through the store. The other ranks wait there for the
next request number.
"""

import logging
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

import msgspec

from ..errors import BackendError, Cancelled, ClientStalled, DeadlineExceeded, InvalidRequest, NoRoom, shortened
from ..progress import CLIENT, PREPARING, PROGRESS
from ..protocol import deadlines, frames, rank_control
from ..protocol.messages import Continue, Done, Error, Progress
from .account import Account
from .diagnosis import diagnose
from .run_steps import RunSteps
from .supervisor_link import ReceivedRequest, SupervisorLink

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from ..engine.request import NextStep
    from .rank_engine import RankEngine

log = logging.getLogger(__name__)

WAIT_TIMEOUT = timedelta(hours=1)
"""How often a rank that waits for a request wakes up and waits again, since both waits need some timeout."""

REST_TIMEOUT = timedelta(seconds=10)
"""How long a rank waits after a request before it frees what it has kept for the next one."""

CLIENT_TIMEOUT = 60.0
"""Longest time in seconds that a client may read none of its reply's bytes, or send none of its request's."""


_TOLD = {*rank_control.RECOVERABLE} - {rank_control.DONE, ClientStalled.code}
"""Codes of errors that rank 0 itself tells the client."""


class Worker:
    """The request loop of one rank."""

    def __init__(
        self, *, rank: int, world_size: int, engine: "RankEngine", link: SupervisorLink, store: "TCPStore"
    ) -> None:
        self.rank, self._world_size, self._engine, self._link, self._store = rank, world_size, engine, link, store
        self._number = 0

    def run(self) -> None:
        """Run requests for as long as the process lives."""
        timeout = REST_TIMEOUT
        while True:
            ran = self._follow(timeout) if self.rank else self._lead_next(timeout)
            if ran:
                timeout = REST_TIMEOUT
            elif timeout == REST_TIMEOUT:
                self._engine.rest()
                timeout = WAIT_TIMEOUT

    # Ranks 1 and up

    def _follow(self, timeout: timedelta) -> bool:
        """Run the next request; return false if none comes in time."""
        import torch.distributed as dist

        key = f"request/{self._number}"
        try:
            self._store.wait([key], timeout)
        except dist.DistStoreError:
            return False
        frame = frames.unpack(self._store.get(key))
        report_end(self._link, self._run_request(frame, None, report=_ignore, cancelled=_never, next_step=_no_step)[0])
        self._mark_read(self._number)
        self._number += 1
        return True

    def _mark_read(self, number: int) -> None:
        """Count a read of a request; the last rank to read it removes it from the store."""
        if self._store.add(f"read/{number}", 1) == self._world_size - 1:
            self._store.delete_key(f"request/{number}")
            self._store.delete_key(f"read/{number}")

    # Rank 0

    def _lead_next(self, timeout: timedelta) -> bool:
        """Run the next request; return false if none comes in time."""
        request = self._link.take(timeout.total_seconds())
        if request:
            self._lead(request)
        return request is not None

    def _lead(self, request: ReceivedRequest) -> None:
        account = Account()
        with request.connection:
            try:
                with account.timed("receiving"):
                    tensors = _receive_tensors(request, self._engine)
                account.count_received(tensors)
            except (BackendError, ConnectionError) as error:
                self._reply(request, _not_received(request, error), {}, account)
                return
            self._publish(request)
            reporter = _Reporter(request, account)
            pinned = self._engine.device.type == "cuda"
            steps = RunSteps(request, account, timeout=CLIENT_TIMEOUT, pinned=pinned, on_failure=reporter.fail)
            finished, results = self._run_request(
                request.frame, tensors, report=reporter, cancelled=request.cancelled.is_set, next_step=steps.next
            )
            if reporter.failure and finished.code in rank_control.RECOVERABLE:
                # A message may have been sent in part, so nothing can follow it.
                finished = _abandoned(request, reporter.failure, "its progress was not read")
            account.add_phases(PROGRESS.spent())
            self._reply(request, finished, None if steps.answered else results, account)

    def _publish(self, request: ReceivedRequest) -> None:
        """Put a request into the store, where the other ranks wait for it."""
        if self._world_size > 1:
            self._store.set(f"request/{self._number}", request.header.decode())
            self._number += 1

    def _reply(
        self,
        request: ReceivedRequest,
        finished: rank_control.Finished,
        results: "Mapping[str, Tensor] | None",
        account: Account,
    ) -> None:
        """End a request with its results, with None if the client has them already, or with an error."""
        from ..protocol.tensors import send

        deadline = deadlines.Deadline(CLIENT_TIMEOUT, "sending a reply")
        try:
            with account.timed("replying"):
                if finished.code == rank_control.DONE and results is not None:
                    send(request.connection, Done(), results, deadline=deadline)
                    account.count_step(results)
                elif finished.code in _TOLD:
                    send(request.connection, Error(code=finished.code, message=finished.message), deadline=deadline)
        except (DeadlineExceeded, ConnectionError) as error:
            abandoned = _abandoned(request, error, "its reply was not read")
            finished = msgspec.structs.replace(abandoned, unheard=finished.unheard)
        request.connection.close()
        report_end(self._link, account.added_to(finished))

    # All ranks

    def _run_request(
        self,
        frame: frames.Frame,
        tensors: "Mapping[str, Tensor] | None",
        *,
        report: "Callable[[Progress, Mapping[str, Tensor]], None]",
        cancelled: Callable[[], bool],
        next_step: "NextStep",
    ) -> "tuple[rank_control.Finished, Mapping[str, Tensor]]":
        message, results = frame.message, dict[str, "Tensor"]()
        try:
            with PROGRESS.phase(PREPARING):
                results = self._engine.handle(
                    message, frame.tensors, tensors, report=report, cancelled=cancelled, next_step=next_step
                )
        except (InvalidRequest, Cancelled, NoRoom) as error:
            return _finished(frame, error.code, str(error)), {}
        except BaseException as error:
            log.exception("request %s failed", message.request_id)
            return diagnose(error, message.request_id), {}
        return _finished(frame, rank_control.DONE, ""), results


def report_end(link: SupervisorLink, finished: rank_control.Finished) -> None:
    """Report the end of a request; after an error that makes the ranks unusable, wait to be killed."""
    link.report_finished(finished)
    if finished.code not in rank_control.RECOVERABLE:
        time.sleep(CLIENT_TIMEOUT)
        sys.exit(1)


class _Reporter:
    """Sends progress to the client; cancels the request if the client does not read it.

    Attributes:
        failure: why the client did not read; None if it did.
    """

    def __init__(self, request: ReceivedRequest, account: Account) -> None:
        self._request, self._account = request, account
        self.failure: BackendError | ConnectionError | None = None

    def __call__(self, progress: Progress, tensors: "Mapping[str, Tensor]") -> None:
        from ..protocol.tensors import send

        if self._request.cancelled.is_set():
            return
        try:
            deadline = deadlines.Deadline(CLIENT_TIMEOUT, "sending progress")
            with PROGRESS.phase(CLIENT):
                send(self._request.connection, progress, tensors, deadline=deadline)
            self._account.count(tensors)
        except (DeadlineExceeded, ConnectionError) as error:
            self.fail(error)

    def fail(self, error: BackendError | ConnectionError) -> None:
        """Cancel the request, since the client did not read."""
        log.info("cancelling request %s: %s", self._request.frame.message.request_id, error)
        self.failure = error
        self._request.cancelled.set()


def _receive_tensors(request: ReceivedRequest, engine: "RankEngine") -> "dict[str, Tensor]":
    from ..protocol.tensors import is_sent, recv_tensors, send

    def poll() -> None:
        if request.cancelled.is_set():
            raise Cancelled("the request was cancelled")

    poll()
    deadline = deadlines.Deadline(CLIENT_TIMEOUT, "receiving a request's tensors")
    elsewhere = engine.elsewhere
    missing = elsewhere.missing(request.frame.message) if elsewhere else ()
    kept = engine.kept_names(request.frame.message, request.frame.tensors)
    send(request.connection, Continue(missing=missing, kept=kept), deadline=deadline)
    if elsewhere and missing:
        elsewhere.receive(request.connection, missing, deadline=deadline, poll=poll)
    sent = [meta for meta in request.frame.tensors if is_sent(meta, kept)]
    return recv_tensors(request.connection, sent, deadline=deadline, poll=poll)


def _not_received(request: ReceivedRequest, error: BackendError | ConnectionError) -> rank_control.Finished:
    """A request's tensors are wrong or did not arrive, so the other ranks do not receive the request."""
    if isinstance(error, InvalidRequest):
        finished = _finished(request.frame, error.code, str(error))
    else:
        finished = _abandoned(request, error, "its tensors did not arrive")
    return msgspec.structs.replace(finished, unheard=True)


def _abandoned(request: ReceivedRequest, error: BackendError | ConnectionError, what: str) -> rank_control.Finished:
    """A request's client is gone, has cancelled, or does not respond."""
    if isinstance(error, DeadlineExceeded):
        return _finished(request.frame, ClientStalled.code, f"ComfyUI stood still: {what} within {CLIENT_TIMEOUT:g} s")
    return _finished(request.frame, Cancelled.code, f"the request was cancelled: {what}: {error}")


def _finished(frame: frames.Frame, code: str, message: str) -> rank_control.Finished:
    return rank_control.Finished(request_id=frame.message.request_id, code=code, message=shortened(message))


def _ignore(progress: Progress, tensors: "Mapping[str, Tensor]") -> None:
    """Only rank 0 reports progress."""


def _never() -> bool:
    return False


def _no_step(results: "Mapping[str, Tensor]") -> None:
    """Only rank 0 has a client."""
