"""Format a ``Status`` as text for people and as JSON, and the log of requests as a table."""

from collections.abc import Sequence
from typing import Any

import msgspec

from ..checkpoint.single_file import is_in_memory
from ..progress import IDLE, RankProgress
from ..protocol.hosts import HostStatus
from ..protocol.request_log import RequestLine
from ..protocol.status import HostLink, LoadedModel, RankStatus, SpareStatus, Status


def format_status(status: Status) -> str:
    """A few lines: the backend, its queue, and a line for each rank and for each of its models."""
    idle = f"ends after {status.idle_timeout:g} s without work" if status.idle_timeout else "runs until stopped"
    lines = [
        f"backend      pid {status.pid}, {status.state}, {_size(status.memory)}, {idle}",
        f"layout       {status.layout or 'none yet'}{_approximation_note(status)}",
        f"running      {status.running or 'nothing'}{_origin(status)}",
        f"queued       {', '.join(status.queued) or 'nothing'}",
        f"ranks        {len(status.ranks)}" + (f", generation {status.generation}" if status.ranks else ""),
    ]
    lines.append(f"logs         {status.logs}" + (f" ({status.log_problem})" if status.log_problem else ""))
    if status.listens:
        lines.append(f"listens      {status.listens}")
    if status.internal_errors:
        lines.append(f"errors       {status.internal_errors} that should not have happened, in backend.log")
    links = {rank.host: rank.link for rank in status.ranks if rank.link}
    lines += [_host(host, links.get(host.name)) for host in status.hosts] if len(status.hosts) > 1 else []
    for rank in status.ranks:
        lines.append(_rank(rank))
        lines += [f"             {_model(model)}" for model in rank.models]
    lines.append(f"spares       {len(status.spares)}")
    lines += [_spare(spare) for spare in status.spares]
    return "\n".join(lines)


def fields(status: Status) -> dict[str, Any]:
    """The fields of a status, and ``approximation``: the approximate method of the layout's step loops, or ``""``."""
    found: dict[str, Any] = msgspec.to_builtins(status)
    return found | {"approximation": _approximation(status)}


def format_json(status: Status) -> str:
    """The status's ``fields`` as JSON."""
    return msgspec.json.format(msgspec.json.encode(fields(status))).decode()


def _approximation(status: Status) -> str:
    return status.layout.approximation if status.layout else ""


def _approximation_note(status: Status) -> str:
    approximation = _approximation(status)
    return f" ({approximation}: approximate in Parallel Sampler, exact in other samplers)" if approximation else ""


def _origin(status: Status) -> str:
    origin = status.work.origin if status.work else None
    return f", for node {origin.node} of prompt {origin.prompt}" if origin else ""


def _host(host: HostStatus, link: HostLink | None) -> str:
    name = f"{host.name} ({host.address})" if host.address else host.name or "unknown"
    parts = [f"  host {host.node}     {name}, {host.state}"]
    parts += [str(host.devices)] if host.devices else []
    if host.round_trip is not None:
        parts.append(f"answers in {1000 * host.round_trip:.1f} ms")
    if host.clock is not None and host.node:
        parts.append(f"clock {host.clock:+.3f} s")
    if link:
        whose = f"host {link.host}" if link.host else "the first host"
        parts.append(f"{link.bandwidth / 1e6:.0f} MB/s and {1000 * link.latency:.1f} ms to {whose}")
    parts += [f"{package} {version}" for package, version in host.versions.items()]
    return ", ".join(parts) + (f": {host.problem}" if host.problem else "")


def _rank(rank: RankStatus) -> str:
    device = f", {_size(rank.device_memory)} on the device" if rank.device_memory else ""
    if rank.device_total:
        device += f", {_size(rank.device_used)} of its {_size(rank.device_total)} in use"
    if rank.load is not None:
        device += f", {100 * rank.load:.0f} % busy"
    host = f" on {rank.host}" if rank.host else ""
    return (
        f"  rank {rank.rank}     pid {rank.pid}{host}, {rank.device}, {_size(rank.memory)}{device}, {rank.steps} steps"
        f"{_progress(rank.progress)}"
    )


def _spare(spare: SpareStatus) -> str:
    host = f" on {spare.host}" if spare.host else ""
    return f"  spare      pid {spare.pid}{host}, {'ready' if spare.ready else 'starting'}, {_size(spare.memory)}"


def _progress(progress: RankProgress) -> str:
    if progress.phase == IDLE:
        return ""
    return f", {progress}, {progress.count} parts done, progress {progress.quiet:.0f} s ago"


def _model(model: LoadedModel) -> str:
    times = "once" if model.loads == 1 else f"{model.loads} times"
    note = f"; {model.note}" if model.note else ""
    name = "a copied model" if is_in_memory(model.path) else model.path
    return f"{name} as {model.dtype}: {', '.join(model.parts)} (loaded {times}){note}"


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.0f} MiB" if nbytes < 2**30 else f"{nbytes / 2**30:.2f} GiB"


_HEAD = ("time", "request", "model", "layout", "size", "steps", "seconds", "of that", "MB in", "MB out", "outcome")
_TOTAL = ("queued", "starting", "running")
"""The phases that follow each other; the others are parts of ``running``."""


def format_requests(lines: Sequence[RequestLine]) -> str:
    """Return a table with a row for each line of the log of requests."""
    rows = [_HEAD, *map(_request, lines)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _request(line: RequestLine) -> tuple[str, ...]:
    phases = sorted(line.seconds.items(), key=lambda item: -item[1])
    parts = [f"{phase} {seconds:.1f}" for phase, seconds in phases if phase != "running" and seconds >= 0.05]
    return (
        line.time[:19].replace("T", " "),
        line.kind,
        line.model,
        line.layout or "-",
        "x".join(map(str, line.size)) or "-",
        str(line.steps or "-"),
        f"{sum(line.seconds.get(phase, 0.0) for phase in _TOTAL):.2f}",
        ", ".join(parts) or "-",
        f"{line.received / 1e6:.1f}",
        f"{line.sent / 1e6:.1f}",
        line.outcome,
    )
