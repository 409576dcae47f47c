"""How long the supervisor waits, how much it queues, and how many spare ranks it keeps."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..progress import CLIENT, COMPILING, CONNECTING, LOADING, STARTING


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long the supervisor waits before it gives up on a rank, in seconds.

    Attributes:
        start: until all ranks have joined the process group.
        hang: without a heartbeat, from an inactive process.
        stall: without a heartbeat, from a process that computes, reads from a disk or waits for a core (a long call
            that holds Python's GIL, or a busy machine).
        evidence: between the first failure and the verdict, so that the error names the rank at fault and not a rank
            that only noticed.
        blame: like ``evidence``, while every failure looks as if another rank caused it, or as if a process is about to
            exit.
        progress: without progress of any rank that works on a request. Ranks count blocks of the transformer, layers of
            other models, and steps.
        steps: like ``progress``, as a multiple of the longest of a rank's last counts, for slow ranks.
        first: like ``progress``, before a rank's second count in a phase: the first one may compile kernels.
        load: like ``progress``, while weights load: for one tensor of a slow disk, and the import of diffusers.
        connect: like ``progress``, while a process group connects for the first time.
        compile: like ``progress``, while a block of a transformer is compiled.
        compute: like ``progress``, for a rank without a GPU whose process uses its cores: one layer may take long.
    """

    start: float = 120.0
    hang: float = 8.0
    stall: float = 120.0
    evidence: float = 0.5
    blame: float = 4.0
    progress: float = 60.0
    steps: float = 20.0
    first: float = 180.0
    load: float = 120.0
    connect: float = 60.0
    compile: float = 600.0
    compute: float = 600.0

    @property
    def phases(self) -> Mapping[str, float]:
        """Time limits of phases with a limit of their own. ``start`` and the deadlines of rank 0 limit two phases."""
        return {
            CLIENT: math.inf,
            STARTING: math.inf,
            LOADING: self.load,
            CONNECTING: self.connect,
            COMPILING: self.compile,
        }


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of the queue and of spare ranks, and how long the supervisor waits, in seconds.

    Attributes:
        queue: requests in the queue.
        outcomes: number of remembered outcomes.
        cancel: until a cancelled request ends.
        agree: until rank 0 ends a request that another rank refused; it may wait for a client that does not read.
        settle: until the other ranks end a request that rank 0 ended without a result.
        end: until killed ranks exit.
        keepalive_interval: between two keepalives to the clients of queued requests.
        idle: without a request before spare ranks start; longer than between two steps of one prompt.
        spares: number of spare ranks; None for the last set's number of ranks, as far as memory allows.
        patience: with the ranks.
    """

    queue: int = 16
    outcomes: int = 64
    cancel: float = 120.0
    agree: float = 70.0
    settle: float = 20.0
    end: float = 10.0
    keepalive_interval: float = 5.0
    idle: float = 2.0
    spares: int | None = 0
    patience: Patience = field(default_factory=Patience)
