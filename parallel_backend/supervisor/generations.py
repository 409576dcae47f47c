"""Sets of ranks, one after the other: the one that works, and those that were ended and are not gone yet."""

import logging
import time
from collections.abc import Callable, Sequence

from ..protocol import rank_control
from ..protocol.endpoint import Endpoint
from ..protocol.messages import Devices
from .event_loop import EventLoop
from .rank_set import Patience, RankSet

log = logging.getLogger(__name__)


class Generations:
    """At most one set works at a time, and the next one starts only when the last one's devices are free.

    ``limit`` is how many seconds ended ranks have to be gone. ``on_finished`` goes to every ``RankSet``.
    """

    def __init__(
        self,
        *,
        endpoint: Endpoint,
        command: Sequence[str],
        patience: Patience,
        limit: float,
        events: EventLoop,
        on_finished: Callable[[int, rank_control.Finished], None],
    ) -> None:
        self._endpoint, self._command, self._patience, self._limit = endpoint, command, patience, limit
        self._events, self._on_finished = events, on_finished
        self._ending: list[RankSet] = []
        self.current: RankSet | None = None
        self.number = 0

    def start(self, devices: Devices) -> None:
        """Start the next set, unless one that was ended is still there.

        Raises:
            OSError: a process cannot be started.
        """
        if self._ending:
            return
        self.number += 1
        self.current = RankSet(
            generation=self.number,
            devices=devices,
            endpoint=self._endpoint,
            command=self._command,
            patience=self._patience,
            events=self._events,
            on_finished=self._on_finished,
        )
        self.current.start()

    def end(self) -> None:
        """Kill the set that works, if there is one."""
        if self.current:
            self.current.end()
            self._ending.append(self.current)
            self.current = None

    def bury(self) -> bool:
        """Forget ended ranks once they are gone, or do not go although they were killed; whether some are left."""
        for ended in list(self._ending):
            overdue = time.monotonic() - (ended.ended or 0.0) > self._limit
            if overdue and not ended.gone:
                log.error("ranks of generation %d do not end although they were killed", ended.generation)
            if overdue or ended.gone:
                self._ending.remove(ended)
        return bool(self._ending)
