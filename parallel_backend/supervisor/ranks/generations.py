"""Successive sets of ranks: the current one, and killed ones that have not exited yet."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence

from ...protocol import rank_control
from ...protocol.model_spec import Devices
from ..event_loop import EventLoop
from ..limits import Patience
from ..log_files import LogFiles
from .other_hosts import NoOtherHosts, OtherHosts
from .rank_set import RankSet
from .rank_start import StartedProcess

log = logging.getLogger(__name__)


class Generations:
    """Runs at most one set of ranks at a time; the next one starts only once the previous one has freed its devices.

    ``exit_patience`` is the time for killed ranks to exit, in seconds. For other arguments see ``RankSet``.

    Attributes:
        current: the set that takes requests, if there is one.
        number: the generation of the newest set.
    """

    def __init__(
        self,
        *,
        logs: LogFiles,
        command: Sequence[str],
        patience: Patience,
        exit_patience: float,
        events: EventLoop,
        on_finished: Callable[[int, rank_control.Finished], None],
        take_spares: Callable[[Devices], Iterator[StartedProcess]],
        hosts: OtherHosts | None = None,
    ) -> None:
        self._logs, self._command, self._patience = logs, command, patience
        self._exit_patience, self._events, self._on_finished = exit_patience, events, on_finished
        self._take_spares, self._hosts = take_spares, hosts or NoOtherHosts()
        self._killed: list[RankSet] = []
        self.current: RankSet | None = None
        self.number = 0

    def start(self, devices: Devices) -> None:
        """Start the next set, unless killed ranks have not exited yet.

        Raises:
            OSError: a process does not start.
        """
        if self._killed:
            return
        self.number += 1
        self.current = RankSet(
            generation=self.number,
            devices=devices,
            logs=self._logs,
            command=self._command,
            patience=self._patience,
            events=self._events,
            on_finished=self._on_finished,
            take_spares=self._take_spares,
            hosts=self._hosts,
        )
        self.current.start()

    def store_port(self, generation: int) -> int | None:
        """The port of the store of a set, on this host's loopback interface; None if the set has ended."""
        return self.current.store_port if self.current and self.current.generation == generation else None

    def kill(self) -> None:
        """Kill the current set, if there is one."""
        if self.current:
            self.current.kill()
            self._killed.append(self.current)
            self.current = None

    def forget_exited(self) -> bool:
        """Forget killed sets that have exited or are overdue. Return whether any are left."""
        for killed in list(self._killed):
            overdue = time.monotonic() - (killed.killed_at or 0.0) > self._exit_patience
            if overdue and not killed.exited:
                log.error("the ranks of generation %d were killed but do not exit", killed.generation)
            if overdue or killed.exited:
                self._killed.remove(killed)
        return bool(self._killed)
