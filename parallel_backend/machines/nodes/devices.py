"""Parse the user's choice of devices where the backend has several hosts, or is on another machine."""

import re
from collections.abc import Sequence
from dataclasses import replace

from ...client.devices import KnowsHosts, parse_devices
from ...errors import InvalidRequest
from ...protocol.hosts import HostStatus
from ...protocol.model_spec import FIRST, Devices
from ..links.backends import SERVE


def devices_of(client: KnowsHosts, text: str) -> Devices:
    """Parse ``"all"``, ``"0,1"`` or ``"0,1,0@second,1@second"``, with numbers of a host's devices and its name.

    ``"all"`` means the devices of all joined hosts that are of the first host's kind. Devices without a host's name are
    the first host's, see ``parse_devices``.

    Raises:
        InvalidRequest: a device or a host does not exist.
        BackendError: the backend is on another machine and does not answer.
    """
    remote, hosts = client.remote, client.hosts()
    if "@" in text and len(hosts) < 2:
        raise InvalidRequest(
            f"devices {text!r}: no backend of several hosts answers; python -m parallel_backend serve --nnodes N "
            "--interface NAME, before ComfyUI needs one, would work"
        )
    others = [host for host in hosts if host.node and host.state == "joined" and host.devices]
    if not remote and not others and "@" not in text:
        return parse_devices(text)
    first = _of_first_host(text, hosts, remote=remote)
    return _everything(first, others) if text.strip().lower() == "all" else _listed(text, first, others)


def _of_first_host(text: str, hosts: Sequence[HostStatus], *, remote: bool) -> Devices:
    if not remote:
        return parse_devices("all")
    devices = hosts[0].devices if hosts else None
    if devices is None:
        raise InvalidRequest(
            f"devices {text!r}: the backend was started for its own machine alone: start it there with {SERVE}"
        )
    return devices


def _everything(first: Devices, others: Sequence[HostStatus]) -> Devices:
    places = [(FIRST, index) for index in first.indices]
    for host in others:
        if host.devices and host.devices.kind == first.kind:
            places += [(host.name, index) for index in host.devices.indices]
    return _placed(first, places)


def _listed(text: str, first: Devices, others: Sequence[HostStatus]) -> Devices:
    there = {FIRST: first} | {host.name: host.devices for host in others if host.devices}
    places = [_place(word.strip(), text, there) for word in text.split(",")]
    for index, place in enumerate(places):
        shared = first.kind == "cuda" and first.collectives == "gloo"
        if place in places[:index] and not shared:
            raise InvalidRequest(f"devices {text!r}: {_name(place)} is listed twice; name each device once")
    if places[0][0] != FIRST:
        raise InvalidRequest(f"devices {text!r}: the first one has to be on the first host, such as {first.indices[0]}")
    return _placed(first, places)


def _place(word: str, text: str, there: dict[str, Devices]) -> tuple[str, int]:
    match = re.fullmatch(r"(?:cuda:)?([0-9]{1,4})(?:@(.+))?", word)
    if not match or (match[2] or FIRST) not in there:
        hosts = ", ".join(name for name in there if name) or "none"
        raise InvalidRequest(
            f'devices {text!r}: {word!r} is no device; numbers of the first host\'s devices, and numbers with "@" and '
            f"a host's name for others, would work (hosts that have joined: {hosts})"
        )
    host, index = match[2] or FIRST, int(match[1])
    devices = there[host]
    if devices.kind != there[FIRST].kind:
        raise InvalidRequest(f"devices {text!r}: {word!r} is a {devices.kind} device, and the first host has others")
    if index not in devices.indices and devices.kind == "cuda":
        known = ", ".join(_name((host, each)) for each in devices.indices)
        raise InvalidRequest(f"devices {text!r}: there is no device {word}; {known} would work")
    return host, index


def _placed(first: Devices, places: Sequence[tuple[str, int]]) -> Devices:
    hosts = tuple(host for host, _ in places)
    return replace(first, indices=tuple(index for _, index in places), hosts=hosts if any(hosts) else ())


def _name(place: tuple[str, int]) -> str:
    host, index = place
    return f"{index}@{host}" if host else str(index)
