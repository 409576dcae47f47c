"""The parser of the loader's ``devices``, which is the client's."""

from ...parallel_backend.client.devices import parse_devices

__all__ = ["parse_devices"]
