"""What the backend says about itself: its ranks, the models that they hold, and what it does."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec

from ..layout.parallel_layout import ParallelLayout
from ..progress import RankProgress
from .hosts import HostStatus

Bytes = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""A size in bytes, which is checked when it arrives."""


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model whose weights a rank holds.

    Attributes:
        path: the checkpoint's folder.
        stamp: that of the ``ModelSpec`` with which it was opened.
        layout: the one in which a transformer was last used, without options of single loops; None if none was.
        dtype: of the weights.
        parts: names of the loaded components.
        loads: how often weights have been loaded.
        note: anything unexpected, for the user.
    """

    path: str
    stamp: str = ""
    layout: ParallelLayout | None = None
    dtype: str
    parts: tuple[str, ...]
    loads: int
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class HostLink:
    """The network to a host, as a rank of another one has measured it.

    Attributes:
        host: the name of that host, "" for the first.
        latency: seconds of a message one way.
        bandwidth: bytes a second.
    """

    host: str
    latency: float
    bandwidth: float


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """One rank, according to the process table and the rank itself. Memory in bytes; ``steps`` since its start.

    ``host`` is the name of its host, "" for the first; ``pid`` is its process id there. ``link`` is that to the host
    before its own, if the rank is the first one of its host.
    """

    rank: int
    pid: int
    device: str
    memory: Bytes
    device_memory: Bytes = 0
    models: tuple[LoadedModel, ...] = ()
    steps: int = 0
    progress: RankProgress = field(default_factory=RankProgress)
    host: str = ""
    link: HostLink | None = None


@dataclass(frozen=True, kw_only=True)
class SpareStatus:
    """A process that can become a rank, according to the process table. Memory in bytes.

    Attributes:
        ready: whether it has imported what ranks need.
        host: the name of its host, "" for the first; ``pid`` is its process id there.
    """

    pid: int
    memory: Bytes
    ready: bool
    host: str = ""


@dataclass(frozen=True, kw_only=True)
class Status:
    """The backend at one moment.

    ``layout`` is that of the running request, or of the most recent one. ``logs`` is the folder of the logs, and
    ``log_problem`` says what keeps lines from it; "" if nothing does. ``internal_errors`` counts the exceptions that
    should not have happened: each closed one connection, or ended the ranks and their request, and its trace is in the
    log. ``listens`` is the address for other machines; "" if there is none.
    ``hosts`` are all that are expected or have joined, the first one included. ``interface`` is the one over which
    their ranks talk. ``most_spares`` is how many spare ranks the first host is to have, None for as many as fit.
    """

    pid: int
    protocol: int
    generation: int
    state: Literal["idle", "starting", "busy", "stopping"]
    running: str | None
    queued: tuple[str, ...]
    layout: ParallelLayout | None
    idle_timeout: float
    memory: Bytes
    ranks: tuple[RankStatus, ...]
    logs: str = ""
    log_problem: str = ""
    spares: tuple[SpareStatus, ...] = ()
    internal_errors: int = 0
    hosts: tuple[HostStatus, ...] = ()
    listens: str = ""
    interface: str = ""
    most_spares: int | None = None


@dataclass(frozen=True, kw_only=True)
class StatusQuery:
    """Ask for the ``Status``."""
