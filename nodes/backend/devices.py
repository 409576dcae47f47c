"""The loader's ``devices``, and what ranks on other hosts have to know of a model's files."""

from ...parallel_backend.checkpoint.checkpoint import Checkpoint
from ...parallel_backend.client.host_devices import devices_of
from ...parallel_backend.protocol.model_spec import Devices
from .connection import client


def parse_devices(text: str) -> Devices:
    """Return the devices that the text means to the backend, see ``devices_of``."""
    return devices_of(client(), text)


def content_for(checkpoint: Checkpoint, devices: Devices) -> str:
    """Return what other hosts find their copies of a model by; "" where all ranks read ComfyUI's own files.

    Raises:
        InvalidRequest: a file cannot be read.
    """
    return checkpoint.content() if devices.hosts or client().remote else ""
