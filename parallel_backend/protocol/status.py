"""The backend's status: its ranks, their models, and its current work."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

import msgspec

from ..layout.parallel_layout import ParallelLayout
from ..progress import RankProgress
from .hosts import HostStatus
from .origin import Origin

Bytes = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
"""A size in bytes, which is checked when it arrives."""


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A model whose weights a rank holds.

    Attributes:
        path: the checkpoint's folder.
        stamp: of the ``ModelSpec`` that opened it.
        layout: the transformer's last layout, without options of single loops; None before its first use.
        dtype: of the weights.
        parts: names of the loaded components.
        loads: number of times that weights were loaded.
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
        host: the other end's name, "" for the first host.
        latency: seconds of a message one way.
        bandwidth: bytes a second.
    """

    host: str
    latency: float
    bandwidth: float


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """One rank, according to the process table and the rank itself. Memory in bytes; ``steps`` since its start.

    ``host`` is the name of its host, "" for the first; ``pid`` is its process id there. ``link`` leads to the previous
    host, if the rank is the first on its host. ``device_name`` is the device's name for people. All processes together
    use ``device_used`` of its ``device_total`` bytes; a CPU rank's device is its machine. ``load`` is the share of time
    for which the device worked since the last report, and None where nothing measures it.
    """

    rank: int
    pid: int
    device: str
    memory: Bytes
    device_memory: Bytes = 0
    device_name: str = ""
    device_used: Bytes = 0
    device_total: Bytes = 0
    load: float | None = None
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
class Work:
    """The running request.

    Attributes:
        kind: the request's class.
        origin: the node that asks; None outside of a prompt.
        model: the checkpoint's path.
        automatic: whether the backend chooses the layout.
        seconds: since the ranks have it.
    """

    kind: str
    origin: Origin | None = None
    model: str = ""
    automatic: bool = False
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Status:
    """The backend at one moment.

    ``layout`` is the running request's, or the most recent one's. ``logs`` is the folder of the logs, and
    ``log_problem`` says why lines cannot be written there; "" if they can. ``internal_errors`` counts the exceptions
    that should not have happened: each closed one connection, or ended the ranks and their request, and its trace is in
    the log. ``listens`` is the address for other machines; "" if there is none.
    ``hosts`` are all expected or joined hosts, with the first one. ``interface`` is the network interface between their
    ranks. ``most_spares`` is the target number of spare ranks on the first host; None: as many as fit. ``work`` is
    what runs.
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
    work: Work | None = None


@dataclass(frozen=True, kw_only=True)
class StatusQuery:
    """Ask for the ``Status``."""
