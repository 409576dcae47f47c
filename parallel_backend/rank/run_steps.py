"""The steps that a client sends on one connection, on rank 0: each is answered before the next is read."""

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ..errors import BackendError, DeadlineExceeded, InvalidRequest, ProtocolError
from ..protocol import deadlines, frames
from ..protocol.frames import TensorMeta
from ..protocol.messages import Done, Step
from ..protocol.run_key import is_changing

if TYPE_CHECKING:
    from torch import Tensor

    from .account import Account
    from .supervisor_link import ReceivedRequest

log = logging.getLogger(__name__)

IDLE = 10.0
"""Seconds that a client has between an answer and its next step."""


class _GivesWay(Exception):
    """Another request needs the ranks, or the client has cancelled."""


class RunSteps:
    """Answers the steps of a ``Forward``.

    Args:
        pinned: whether tensors go to a GPU.
        on_failure: called with the error if the client does not read an answer.

    Attributes:
        answered: whether the client has the answer to all that it asked.
    """

    def __init__(
        self,
        request: "ReceivedRequest",
        account: "Account",
        *,
        timeout: float,
        pinned: bool,
        on_failure: Callable[[BackendError | ConnectionError], None],
    ) -> None:
        self._request, self._account, self._timeout, self._on_failure = request, account, timeout, on_failure
        self._pinned = pinned
        changing = [meta for meta in request.frame.tensors if is_changing(meta)]
        self._metas: tuple[TensorMeta, ...] = tuple(changing)
        self.answered = False

    def next(self, results: "Mapping[str, Tensor]") -> "dict[str, Tensor] | None":
        """Answer with ``results``, and return the tensors of the next step.

        Returns:
            None if another request needs the ranks, and then there may be no answer yet. None also if the client ends
            the run, is silent for ``IDLE`` seconds, or sends what is no step of this run or does not fit into (pinned)
            memory. A client that still waits then asks again, with a request of its own.
        """
        from ..protocol.tensors import send

        self.answered = False
        if self._gives_way():
            return None
        try:
            deadline = deadlines.Deadline(self._timeout, "sending a step's reply")
            send(self._request.connection, Done(open=True), results, deadline=deadline)
        except (DeadlineExceeded, ConnectionError) as error:
            self._on_failure(error)
            return None
        self._account.count_step(results)
        self.answered = True
        try:
            return self._receive()
        except (_GivesWay, DeadlineExceeded, ConnectionError):
            return None
        except (ProtocolError, InvalidRequest) as error:
            log.warning("a run ends: %s", error)
            return None

    def _receive(self) -> "dict[str, Tensor]":
        from ..protocol.tensors import is_sent, recv_tensors

        connection = self._request.connection
        idle = deadlines.Deadline(IDLE, "waiting for a run's next step")
        frame = frames.recv_header(connection, deadline=idle, poll=self._poll)
        if not isinstance(frame.message, Step) or frame.tensors != self._metas:
            raise ProtocolError("its client sent what is no step of it")
        deadline = deadlines.Deadline(self._timeout, "receiving a step's tensors")
        sent = [meta for meta in self._metas if is_sent(meta, ())]
        received = recv_tensors(connection, sent, deadline=deadline, poll=self._poll_cancelled, pinned=self._pinned)
        self._account.count_received(received)
        return {meta.name: received[meta.same or meta.name] for meta in self._metas}

    def _gives_way(self) -> bool:
        return self._request.cancelled.is_set() or self._request.gives_way.is_set()

    def _poll(self) -> None:
        if self._gives_way():
            raise _GivesWay

    def _poll_cancelled(self) -> None:
        """Within a step: its client may cancel between two tensors, while another request waits for the whole step."""
        if self._request.cancelled.is_set():
            raise _GivesWay
