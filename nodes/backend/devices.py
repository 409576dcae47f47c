"""The parser of the loader's ``devices``, which is the client's."""

from ...parallel_backend.client.host_devices import devices_of
from ...parallel_backend.protocol.model_spec import Devices
from .connection import client


def parse_devices(text: str) -> Devices:
    """Return the devices that the text means to the backend, see ``devices_of``."""
    return devices_of(client(), text)
