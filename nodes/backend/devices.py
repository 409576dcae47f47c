"""The loader's ``devices``, and what ranks on other hosts have to know of a model's files."""

import time

from ...parallel_backend.checkpoint.checkpoint import Checkpoint
from ...parallel_backend.client.client import Client
from ...parallel_backend.client.devices import devices_of
from ...parallel_backend.errors import BackendError
from ...parallel_backend.protocol.hosts import HostStatus
from ...parallel_backend.protocol.model_spec import Devices
from .session import current

SHARED = 1.0
"""Seconds for which the backend's answer about its hosts, or that there is none, serves all nodes of a prompt."""


class _RecentHosts:
    """What the session's client says for ``devices_of``, at most ``SHARED`` seconds ago."""

    def __init__(self) -> None:
        self._asked: Client | None = None
        self._time = 0.0
        self._hosts: tuple[HostStatus, ...] | BackendError = ()

    @property
    def remote(self) -> bool:
        """See ``Client``."""
        return current().client.remote

    def hosts(self) -> tuple[HostStatus, ...]:
        """See ``Client``."""
        client = current().client
        if client is not self._asked or time.monotonic() - self._time >= SHARED:
            try:
                self._hosts = client.hosts()
            except BackendError as error:
                self._hosts = error
            self._asked, self._time = client, time.monotonic()
        if isinstance(self._hosts, BackendError):
            raise self._hosts.with_traceback(None)
        return self._hosts


def parse_devices(text: str) -> Devices:
    """Return the devices that the text means to the backend, see ``devices_of``."""
    return devices_of(current().part(_RecentHosts), text)


def content_for(checkpoint: Checkpoint, devices: Devices) -> str:
    """Return what other hosts find their copies of a model by; "" where all ranks read ComfyUI's own files.

    Raises:
        InvalidRequest: a file cannot be read.
    """
    return checkpoint.content() if devices.hosts or current().client.remote else ""
