"""The loop of one rank: it carries out requests until its supervisor goes away.

Rank 0 takes requests from the supervisor and passes each on through the store, where the others wait for the next
number.
"""

import logging
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..errors import BackendError, Cancelled, DeadlineExceeded, InvalidRequest, OutOfMemory, RankFailed
from ..protocol import deadlines, frames, rank_control
from ..protocol.messages import Continue, Done, Echo, Error, Progress
from .supervisor_link import ReceivedRequest, SupervisorLink

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    from ..engine.engine import Engine

log = logging.getLogger(__name__)

LONGEST_TEXT = 4000
"""Characters of an error that are passed on; the log has them all."""

STORE_PATIENCE = timedelta(hours=1)
"""How often a waiting rank asks the store anew; the link ends the process long before it matters."""

SEND_PATIENCE = 60.0
"""Seconds that a client may take none of its reply's bytes, or send none of its request's."""


class Worker:
    """The loop of one rank."""

    def __init__(self, *, rank: int, world: int, engine: "Engine", link: SupervisorLink, store: "TCPStore") -> None:
        self.rank, self._world, self._engine, self._link, self._store = rank, world, engine, link, store
        self._number = 0

    def run(self) -> None:
        """Carry out requests for as long as the process lives."""
        while True:
            if self.rank:
                self._follow()
            else:
                job = self._link.take(STORE_PATIENCE.total_seconds())
                if job:
                    self._lead(job)

    # Ranks 1 and up

    def _follow(self) -> None:
        import torch.distributed as dist

        key = f"request/{self._number}"
        try:
            self._store.wait([key], STORE_PATIENCE)
        except dist.DistStoreError:
            return
        frame = frames.unpack(self._store.get(key))
        self._tell(self._carry_out(frame, None, report=_ignore, cancelled=_never)[0])
        self._forget(self._number)
        self._number += 1

    def _forget(self, number: int) -> None:
        """Remove a request from the store once every other rank has read it."""
        if self._store.add(f"read/{number}", 1) == self._world - 1:
            self._store.delete_key(f"request/{number}")
            self._store.delete_key(f"read/{number}")

    # Rank 0

    def _lead(self, job: ReceivedRequest) -> None:
        with job.connection:
            try:
                tensors = _receive(job)
            except InvalidRequest as error:
                self._reply(job, _finished(job, error.code, str(error)), {})
                return
            except (BackendError, ConnectionError) as error:
                self._reply(job, _cancelled(job, f"its tensors did not arrive: {error}"), {})
                return
            if self._world > 1:
                self._store.set(f"request/{self._number}", job.header.decode())
                self._number += 1
            finished, results = self._carry_out(
                job.frame, tensors, report=_Reporter(job), cancelled=job.cancelled.is_set
            )
            self._reply(job, finished, results)

    def _reply(self, job: ReceivedRequest, finished: rank_control.Finished, results: "Mapping[str, Tensor]") -> None:
        from ..protocol.tensors import send

        deadline = deadlines.Deadline(SEND_PATIENCE, "sending a reply")
        try:
            if finished.code == rank_control.DONE:
                send(job.connection, Done(), results, deadline=deadline)
            elif finished.code in rank_control.HARMLESS:
                send(job.connection, Error(code=finished.code, message=finished.message), deadline=deadline)
        except (DeadlineExceeded, ConnectionError) as error:
            finished = _cancelled(job, f"its reply was not taken: {error}")
        job.connection.close()
        self._tell(finished)

    # All ranks

    def _carry_out(
        self,
        frame: frames.Frame,
        tensors: "Mapping[str, Tensor] | None",
        *,
        report: "Callable[[Progress, Mapping[str, Tensor]], None]",
        cancelled: Callable[[], bool],
    ) -> "tuple[rank_control.Finished, Mapping[str, Tensor]]":
        message, code, text, by_peer = frame.message, rank_control.DONE, "", False
        results: Mapping[str, Tensor] = {}
        try:
            if isinstance(message, Echo):
                results = _echo(message, tensors, report)
            else:
                results = self._engine.handle(message, frame.tensors, tensors, report=report, cancelled=cancelled)
        except (InvalidRequest, Cancelled) as error:
            code, text = error.code, str(error)
        except BaseException as error:
            log.exception("request %s failed", message.request_id)
            code, text, by_peer = _diagnose(error)
        return rank_control.Finished(request_id=message.request_id, code=code, message=text, by_peer=by_peer), results

    def _tell(self, finished: rank_control.Finished) -> None:
        """Report the end of a request; after an error that spoils the ranks, wait to be ended."""
        self._link.finished(finished)
        if finished.code not in rank_control.HARMLESS:
            time.sleep(SEND_PATIENCE)
            sys.exit(1)


class _Reporter:
    """Sends progress to the client; a client that does not take it has its request cancelled."""

    def __init__(self, job: ReceivedRequest) -> None:
        self._job = job

    def __call__(self, progress: Progress, tensors: "Mapping[str, Tensor]") -> None:
        from ..protocol.tensors import send

        if self._job.cancelled.is_set():
            return
        try:
            deadline = deadlines.Deadline(SEND_PATIENCE, "sending progress")
            send(self._job.connection, progress, tensors, deadline=deadline)
        except (DeadlineExceeded, ConnectionError) as error:
            log.info("request %s is cancelled: %s", self._job.frame.message.request_id, error)
            self._job.cancelled.set()


def _receive(job: ReceivedRequest) -> "dict[str, Tensor]":
    from ..protocol.tensors import recv_tensors, send

    def poll() -> None:
        if job.cancelled.is_set():
            raise Cancelled("the request was cancelled")

    poll()
    deadline = deadlines.Deadline(SEND_PATIENCE, "receiving a request's tensors")
    send(job.connection, Continue(), deadline=deadline)
    return recv_tensors(job.connection, job.frame.tensors, deadline=deadline, poll=poll)


def _echo(message: Echo, tensors: "Mapping[str, Tensor] | None", report: Any) -> "dict[str, Tensor]":
    import torch

    if tensors is None:
        return {}
    results = dict(tensors)
    if message.make:
        results["made"] = torch.full((message.make,), 0.5)
    report(Progress(phase="reply", value=0, total=1), {})
    return results


def _diagnose(error: BaseException) -> tuple[str, str, bool]:
    """Code, text for the user, and whether the cause is likely another rank."""
    import torch

    cause = error.__cause__ if isinstance(error, OutOfMemory) else error
    text = " ".join(str(cause).split())[:LONGEST_TEXT] or "no message"
    if isinstance(error, (torch.OutOfMemoryError, OutOfMemory)):
        return OutOfMemory.code, f"ran out of memory: {text}", False
    communication = isinstance(error, torch.distributed.DistError) or "gloo" in text.lower()
    return RankFailed.code, f"failed: {type(error).__name__}: {text}", communication


def _cancelled(job: ReceivedRequest, why: str) -> rank_control.Finished:
    return _finished(job, Cancelled.code, f"the request was cancelled: {why}")


def _finished(job: ReceivedRequest, code: str, message: str) -> rank_control.Finished:
    return rank_control.Finished(request_id=job.frame.message.request_id, code=code, message=message)


def _ignore(progress: Progress, tensors: "Mapping[str, Tensor]") -> None:
    """Progress is rank 0's to report."""


def _never() -> bool:
    return False
