"""Devices to skip: ranks no longer start on them."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from ..errors import BackendError
from ..layout.suggestions import fitting
from ..protocol.hosts import HostStatus
from ..protocol.model_spec import FIRST, Devices, ModelSpec

AGAIN = 1.0
"""Seconds between two looks at whether a missing host is there again."""


class KnowsHosts(Protocol):
    """The part of a ``Client`` that knows the hosts."""

    def hosts(self) -> tuple[HostStatus, ...]:
        """See ``Client``."""


class LostDevices:
    """Devices that were in use, and where ranks no longer start."""

    def __init__(self) -> None:
        self._lost: dict[Devices, frozenset[tuple[str, int]]] = {}
        self._missing_hosts: frozenset[str] = frozenset()
        self._next_look = 0.0

    def add(self, devices: Devices, ranks: Sequence[int]) -> None:
        """Note that these ranks do not start on their devices."""
        key = _kind(devices)
        self._lost[key] = self._lost.get(key, frozenset()) | {_place(devices, rank) for rank in ranks}

    def without(self, spec: ModelSpec) -> ModelSpec:
        """Return a model's spec with the remaining devices and the nearest layout for that many."""
        devices, lost = spec.devices, self._lost.get(_kind(spec.devices), frozenset())
        left = [rank for rank in range(len(devices.indices)) if _place(devices, rank) not in lost]
        if not left or len(left) == len(devices.indices) or devices.host_of(left[0]) != FIRST:
            return spec
        layout = spec.layout and fitting(spec.layout, len(left))
        return replace(spec, devices=devices.of_ranks(left), layout=layout)

    def add_missing_hosts(self, devices: Devices, ranks: Sequence[int], client: KnowsHosts) -> bool:
        """Record the devices of hosts that disappeared, and return whether there are any.

        They are tried again once their hosts are there.
        """
        hosts = {devices.host_of(rank) for rank in ranks} - {FIRST}
        missing = hosts - _joined(client) if hosts else hosts
        self._missing_hosts |= missing
        self.add(devices, [rank for rank, host in enumerate(devices.hosts) if host in missing])
        return bool(missing)

    def try_hosts_again(self, client: KnowsHosts) -> None:
        """Try the devices of hosts that have come back, at most once in ``AGAIN`` seconds."""
        now = time.monotonic()
        if not self._missing_hosts or now < self._next_look:
            return
        self._next_look = now + AGAIN
        back = self._missing_hosts & _joined(client)
        self._missing_hosts -= back
        self._lost = {
            kind: frozenset(place for place in lost if place[0] not in back) for kind, lost in self._lost.items()
        }

    def forget(self) -> None:
        """Try all devices again."""
        self._lost.clear()
        self._missing_hosts = frozenset()


def _kind(devices: Devices) -> Devices:
    """Return the kind of devices, without numbers and hosts, by which lost devices are listed."""
    return replace(devices, indices=(), hosts=())


def _place(devices: Devices, rank: int) -> tuple[str, int]:
    return devices.host_of(rank), devices.indices[rank]


def _joined(client: KnowsHosts) -> frozenset[str]:
    """The names of the other hosts that have joined; empty if the backend does not answer."""
    try:
        return frozenset(host.name for host in client.hosts() if host.node and host.state == "joined")
    except BackendError:
        return frozenset()
