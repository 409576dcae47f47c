"""Blocking calls to the backend, for ComfyUI's process: imports neither diffusers nor torch.distributed."""

import contextlib
import os
import socket
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from ..errors import BackendError
from ..other_machines import machines
from ..protocol.endpoint import Endpoint
from ..protocol.hosts import HostStatus
from ..protocol.messages import Done, Expect, Forward, RankRequest
from ..protocol.model_spec import Devices
from ..protocol.run_key import run_key
from ..protocol.status import Status
from . import query
from .constant_tensors import ConstantTensors
from .exchange import Exchange, Interrupted, OnProgress, RunEnded, Timeouts, ignore, never
from .launch import connect_or_start
from .open_run import OpenRun
from .retry import RetriedRequest

HOSTS_TIMEOUT = 5.0
"""Seconds that the backend has to say which hosts there are."""


class Client:
    """Talks to the backend of an endpoint and starts it when a request needs it. Safe to use from any thread."""

    def __init__(
        self,
        *,
        endpoint: Endpoint | None = None,
        timeouts: Timeouts | None = None,
        idle_timeout: float | None = None,
    ) -> None:
        self.endpoint, self.timeouts = endpoint or Endpoint.default(), timeouts or Timeouts()
        self._idle_timeout, self._constants, self._run = idle_timeout, ConstantTensors(), OpenRun()

    def call(
        self,
        message: RankRequest,
        tensors: Mapping[str, Tensor] | None = None,
        *,
        interrupted: Interrupted = never,
        on_progress: OnProgress = ignore,
    ) -> dict[str, Tensor]:
        """Have the ranks run a request.

        Args:
            message: the request; its docstring lists the tensors.
            tensors: the request's tensors.
            interrupted: polled every 50 ms; once it returns true, the request is cancelled.
            on_progress: called on this thread; an exception from it ends the call and cancels the request.

        Returns:
            The reply's tensors, on the CPU.

        Raises:
            InvalidRequest: the request cannot work.
            Cancelled: ``interrupted`` returned true, or another client cancelled the request.
            DeadlineExceeded: a phase took too long; the message names it.
            BackendError: any other error of ``errors``.
        """
        return RetriedRequest(self, message, tensors or {}, interrupted=interrupted, on_progress=on_progress).run()

    def attempt(
        self, message: RankRequest, tensors: Mapping[str, Tensor], *, interrupted: Interrupted, on_progress: OnProgress
    ) -> dict[str, Tensor]:
        """Send a request once. Starts the backend if none runs.

        Raises:
            NotAccepted: the backend was about to end.
            BackendError: see ``call``.
        """
        model = replace(message.model, path=os.path.abspath(message.model.path))
        message, files = replace(message, model=model), dict[str, str]()
        if self.remote:
            message, files = machines("links.request_files").to_be_sent(message)
        metas = self._constants.describe(message, tensors)
        key = run_key(message, metas) if isinstance(message, Forward) else None
        with contextlib.suppress(RunEnded):
            reply = self._run.step(key, tensors, interrupted=interrupted, on_progress=on_progress)
            if reply is not None:
                return reply
        if isinstance(message, Forward):
            message = replace(message, steps=key is not None)
        exchange = Exchange(
            endpoint=self.endpoint, timeouts=self.timeouts, message=message, tensors=tensors, metas=metas, files=files,
            interrupted=interrupted, on_progress=on_progress,
        )  # fmt: skip
        with contextlib.ExitStack() as at_end:
            sock = at_end.enter_context(self._connect(interrupted))
            reply = exchange.run(sock)
            at_end.pop_all()
        self._run.keep(key, exchange, sock)
        return reply

    def end_run(self) -> None:
        """Say that no further step follows, so that the ranks are free at once. Without it they wait a few seconds."""
        self._run.end()

    @property
    def remote(self) -> bool:
        """Whether the backend is on another machine."""
        return self.endpoint.remote is not None

    def hosts(self) -> tuple[HostStatus, ...]:
        """The backend's hosts, with the first; empty if no backend for several machines answers here.

        Raises:
            BackendError: the backend on another machine does not answer.
        """
        if not self.remote and not self.endpoint.by_hand.exists():
            return ()
        try:
            return query.status(self.endpoint, seconds=HOSTS_TIMEOUT).hosts
        except BackendError:
            if self.remote:
                raise
            return ()

    def status(self) -> Status:
        """The current status of the backend.

        Raises:
            BackendUnavailable: no backend runs.
        """
        return query.status(self.endpoint, seconds=self.timeouts.connect)

    def stop(self) -> None:
        """Stop the backend, by force if it does not answer, and wait until its processes are gone.

        Raises:
            BackendUnavailable: no backend runs.
            DeadlineExceeded: it does not exit.
        """
        query.stop(self.endpoint, seconds=self.timeouts.stop)

    def expect(self, devices: Devices) -> None:
        """Say that a request on these devices comes soon, so that ranks prepare for it. Start the backend if none runs.

        Does nothing for a backend on another machine.

        Raises:
            BackendError: it does not start, or does not answer.
        """
        if not self.remote:
            self.start()
            query.ask(self.endpoint, Expect(devices=devices), Done, seconds=self.timeouts.connect)

    def start(self, interrupted: Interrupted = never) -> None:
        """Start the backend unless it already runs.

        Raises:
            BackendUnavailable: it does not start.
            DeadlineExceeded: it takes too long to start.
            Cancelled: ``interrupted`` returned true.
        """
        self._connect(interrupted).close()

    def _connect(self, interrupted: Interrupted) -> socket.socket:
        return connect_or_start(
            self.endpoint,
            connect_seconds=self.timeouts.connect,
            start_seconds=self.timeouts.start,
            idle_timeout=self._idle_timeout,
            interrupted=interrupted,
        )
