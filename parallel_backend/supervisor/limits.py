"""How long the supervisor waits, and how much it queues."""

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long the supervisor waits before it gives up on a rank, in seconds.

    Attributes:
        start: for all ranks to join the process group.
        hang: without a heartbeat from a process that is not active either.
        stall: without a heartbeat from a process that computes, reads from a disk or waits for a core (a long call
            that holds Python's GIL, or a busy machine).
        evidence: between the first failure and the verdict, so that the error names the rank that caused it and not
            one that only noticed.
        blame: like ``evidence``, while every failure looks as if another rank caused it.
    """

    start: float = 120.0
    hang: float = 8.0
    stall: float = 120.0
    evidence: float = 0.5
    blame: float = 4.0


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of the queue, and how long the supervisor waits, in seconds.

    Attributes:
        queue: requests in the queue.
        outcomes: remembered outcomes.
        cancel: for a cancelled request to end.
        agree: for rank 0 to end a request that another rank refused; it may be waiting for a client that does not read.
        end: for killed ranks to exit.
        keepalive_interval: between two keepalives to the clients of queued requests.
        patience: with the ranks.
    """

    queue: int = 16
    outcomes: int = 64
    cancel: float = 120.0
    agree: float = 70.0
    end: float = 10.0
    keepalive_interval: float = 5.0
    patience: Patience = field(default_factory=Patience)
