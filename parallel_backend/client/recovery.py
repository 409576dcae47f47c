"""Requests that survive the death of a rank: they go on, from the last finished step, on a fresh set of ranks.

So do those that the backend gave up because this process stood still. After each step of a ``Sample``, rank 0 sends
what the next step begins with, and this process keeps the newest. Any other request is asked once more. Where a device
no longer starts a rank, the rest goes on with one device fewer.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..errors import BackendError, BackendUnavailable, Cancelled, ClientStalled, QueueFull, RankFailed
from ..protocol.deadlines import Deadline
from ..protocol.messages import HISTORY, KEPT, Progress, RankRequest, Sample, new_id
from ..protocol.model_spec import FIRST, ModelSpec
from .client import POLL, Client, Interrupted, OnProgress
from .lost_devices import LostDevices

log = logging.getLogger(__name__)

BUSY_POLL = 1.0
"""Seconds between two attempts to get into a full queue."""
STOOD_STILL = 60.0
"""Seconds without a sign of life of this process after which the backend may have given its request up."""


class RecoveringCall:
    """One request, asked again when ranks fail.

    Args:
        client: asks.
        message: the request.
        tensors: its tensors.
        interrupted: see ``Client.call``.
        on_progress: see ``Client.call``. What is kept for a recovery does not reach it.
        notify: takes a sentence about each recovery, for the user.
        lost: devices to do without.
    """

    def __init__(
        self,
        client: Client,
        message: RankRequest,
        tensors: Mapping[str, Tensor],
        *,
        interrupted: Interrupted | None = None,
        on_progress: OnProgress | None = None,
        notify: Callable[[str], None] = log.warning,
        lost: LostDevices | None = None,
    ) -> None:
        self._client, self._tensors = client, dict(tensors)
        self._message: RankRequest = replace(message, keep=True) if isinstance(message, Sample) else message
        self._interrupted, self._on_progress, self._notify = interrupted, on_progress, notify
        self._lost = lost or LostDevices()
        self._begun = self._lost_some = False
        self._note = ""
        self._failed_at: int | None = None
        self._queueing: Deadline | None = None
        self._last_alive, self._stood_still = time.monotonic(), False

    def run(self) -> dict[str, Tensor]:
        """Return the reply's tensors.

        Raises:
            BackendError: see ``Client.call``. A ``RankFailed`` is raised where ranks do not start, and where they
                fail twice at the same step.
        """
        while True:
            self._live()
            self._begun = self._stood_still = False
            self._lost.try_hosts_again(self._client)
            spec = self._lost.without(self._message.model)
            asked = replace(self._message, model=spec, request_id=new_id())
            try:
                return self._client.call(asked, self._tensors, interrupted=self._poll, on_progress=self._progressed)
            except (RankFailed, ClientStalled) as error:
                self._recover(error, spec)
            except QueueFull as error:
                self._wait_for_room(error)
            except BackendUnavailable as error:
                self._live()
                if not (self._begun and (self._stood_still or self._may_go_on())):
                    raise
                self._recover(error, spec)

    def _may_go_on(self) -> bool:
        """Whether the backend that broke off was not told to end: it removes its socket then, as it does when idle.

        On another machine that cannot be seen, so it is asked once more.
        """
        endpoint = self._client.endpoint
        return endpoint.remote is not None or endpoint.socket.exists()

    def change(self, **options: Any) -> None:
        """Ask with other options from now on."""
        self._message = replace(self._message, **options)

    @property
    def _step(self) -> int:
        """Steps that need not run again."""
        return self._message.first_step if isinstance(self._message, Sample) else 0

    def _progressed(self, progress: Progress, tensors: dict[str, Tensor]) -> None:
        self._live()
        self._begun, self._queueing = True, None
        kept = {name: tensors.pop(name) for name in list(tensors) if name.startswith(KEPT)}
        if kept:
            self._keep(progress.value, {name.removeprefix(KEPT): tensor for name, tensor in kept.items()})
        if self._on_progress is not None:
            notes = [note for note in (progress.note, self._note) if note]
            self._on_progress(replace(progress, note=", ".join(notes)), tensors)

    def _wait_for_room(self, error: QueueFull) -> None:
        """Wait a moment before asking again: others have filled the queue while this request recovered.

        Raises:
            QueueFull: ``error``, if nothing has run yet that would be lost.
            Cancelled: ``interrupted`` returned true.
            DeadlineExceeded: the queue stays full.
        """
        if self._failed_at is None and not self._step:
            raise error
        phase = "waiting for room in the queue to go on"
        self._queueing = self._queueing or Deadline(self._client.timeouts.silence, phase)
        end = time.monotonic() + min(BUSY_POLL, self._queueing.remaining())
        while time.monotonic() < end:
            if self._poll():
                raise Cancelled("the request was cancelled")
            time.sleep(POLL)

    def _poll(self) -> bool:
        self._live()
        return self._interrupted is not None and self._interrupted()

    def _live(self) -> None:
        """Note that this process is alive, and whether it was not for a while."""
        now = time.monotonic()
        self._stood_still = self._stood_still or now - self._last_alive > STOOD_STILL
        self._last_alive = now

    def _keep(self, step: int, kept: Mapping[str, Tensor]) -> None:
        rest = {name: tensor for name, tensor in self._tensors.items() if not name.startswith(HISTORY)}
        self._tensors = {**rest, **kept}
        self.change(first_step=step)

    def _recover(self, error: BackendError, spec: ModelSpec) -> None:
        """Prepare to ask again.

        Raises:
            BackendError: ``error``, if that makes no sense.
        """
        ranks = len(spec.devices.indices)
        # The set may have had more ranks than this request asks for.
        not_started = [rank for rank in getattr(error, "not_started", ()) if rank < ranks]
        here = any(spec.devices.host_of(rank) == FIRST for rank in not_started)
        missing = self._lost.add_missing_hosts(spec.devices, not_started, self._client)
        if missing and not here and self._lost.without(self._message.model) != spec:
            pass
        elif not_started and self._failed_at is not None and not self._lost_some and len(not_started) < ranks:
            self._lost.add(spec.devices, not_started)
            self._lost_some = True  # a second one has another reason than a device that is gone
        elif here or self._failed_at == self._step:
            raise error
        else:
            self._failed_at = self._step
        self._tell(error, self._lost.without(self._message.model))

    def _tell(self, error: BackendError, spec: ModelSpec) -> None:
        where = "asking again"
        if self._step:
            where = self._note = f"going on after step {self._step}"
            if spec.layout and spec.layout.approximate:
                where += ", with a step of warm-up"
        fewer = len(spec.devices.indices) < len(self._message.model.devices.indices)
        if fewer:
            where += f", on {spec.devices}" + (f" with layout {spec.layout}" if spec.layout else "")
        self._notify(f"{where}, since {error}")
