"""The loader's ``devices``, and what ranks on other hosts have to know of a model's files."""

import time
from dataclasses import dataclass

from ...parallel_backend.checkpoint.checkpoint import Checkpoint
from ...parallel_backend.client.client import Client
from ...parallel_backend.client.devices import devices_of
from ...parallel_backend.errors import BackendError
from ...parallel_backend.protocol.hosts import HostStatus
from ...parallel_backend.protocol.model_spec import Devices
from .connection import client

SHARED = 1.0
"""Seconds for which the backend's answer about its hosts, or that there is none, serves all nodes of a prompt."""


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """What came of asking a client at a time of ``time.monotonic``."""

    client: Client
    time: float
    hosts: tuple[HostStatus, ...] | BackendError


_last: list[_Answer] = []


class _RecentHosts:
    """A client for ``devices_of``, whose answer is at most ``SHARED`` seconds old."""

    def __init__(self, asked: Client) -> None:
        self._client, self.remote = asked, asked.remote

    def hosts(self) -> tuple[HostStatus, ...]:
        """See ``Client.hosts``."""
        for answer in _last:
            if answer.client is self._client and time.monotonic() - answer.time < SHARED:
                break
        else:
            answer = self._ask()
            _last[:] = [answer]
        if isinstance(answer.hosts, BackendError):
            raise answer.hosts.with_traceback(None)
        return answer.hosts

    def _ask(self) -> _Answer:
        hosts: tuple[HostStatus, ...] | BackendError
        try:
            hosts = self._client.hosts()
        except BackendError as error:
            hosts = error
        return _Answer(client=self._client, time=time.monotonic(), hosts=hosts)


def parse_devices(text: str) -> Devices:
    """Return the devices that the text means to the backend, see ``devices_of``."""
    return devices_of(_RecentHosts(client()), text)


def content_for(checkpoint: Checkpoint, devices: Devices) -> str:
    """Return what other hosts find their copies of a model by; "" where all ranks read ComfyUI's own files.

    Raises:
        InvalidRequest: a file cannot be read.
    """
    return checkpoint.content() if devices.hosts or client().remote else ""
