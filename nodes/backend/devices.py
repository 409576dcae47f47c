"""The devices of a node, and how other hosts identify a model's files."""

import logging
import threading
import time
from typing import Any

from ...parallel_backend.checkpoint.checkpoint import Checkpoint
from ...parallel_backend.client.client import Client
from ...parallel_backend.client.devices import devices_of
from ...parallel_backend.errors import BackendError
from ...parallel_backend.protocol.hosts import HostStatus
from ...parallel_backend.protocol.model_spec import Devices
from .session import current

SHARED = 1.0
"""Seconds for which the backend's answer about its hosts, or its silence, serves all nodes of a prompt."""

EXPECTING = "parallel-dit-expect"
"""Name of the threads that let ranks prepare."""


class _RecentHosts:
    """The session's client for ``devices_of``, with answers at most ``SHARED`` seconds old."""

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
    """Parse the text for the session's backend, see ``devices_of``."""
    return devices_of(current().part(_RecentHosts), text)


def expect_ranks(devices: Any) -> None:
    """Let ranks on a node's devices prepare while ComfyUI runs other nodes. Neither waits nor raises.

    ComfyUI asks for a node's fingerprint when a valid prompt begins, before it runs any node: that is the time to call
    this. Devices that come from another node are not known yet, and left out.
    """
    if isinstance(devices, str):
        threading.Thread(target=_expect, args=(current().client, devices), name=EXPECTING, daemon=True).start()


def _expect(client: Client, devices: str) -> None:
    try:
        client.expect(parse_devices(devices))
    except BackendError as error:
        logging.info("Parallel DiT: no ranks prepare yet: %s", error)
    except Exception:
        logging.exception("Parallel DiT: the backend could not be asked to prepare ranks")


def content_for(checkpoint: Checkpoint, devices: Devices) -> str:
    """Return the id by which other hosts find their copies of a model; "" if all ranks read ComfyUI's files.

    Raises:
        InvalidRequest: a file cannot be read.
    """
    return checkpoint.content() if devices.hosts or current().client.remote else ""
