"""This host's devices as torch sees them, asked in a process that ends: ``python -m ...nodes.local_devices``."""

import subprocess
import sys

import msgspec

from ... import last_words
from ...errors import BackendUnavailable, InvalidRequest
from ...protocol.model_spec import Devices

SECONDS = 120.0
"""For torch to be imported, and to find the devices."""


def local_devices(text: str) -> Devices:
    """Parse a list of this host's devices, see ``parse_devices``. Initialises no driver in this process.

    Raises:
        InvalidRequest: a device does not exist.
        BackendUnavailable: torch does not list them.
    """
    command = [sys.executable, "-m", "parallel_backend.machines.nodes.local_devices", text]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BackendUnavailable(f"torch does not say which devices there are: {error}") from error
    if done.returncode == _REFUSED:
        raise InvalidRequest(done.stdout.strip())
    if done.returncode:
        raise BackendUnavailable(f"torch does not say which devices there are: {last_words.last_line(done.stderr)}")
    return msgspec.json.decode(done.stdout, type=Devices)


_REFUSED = 65
"""Exit status: stdout has a sentence."""


def _main(text: str) -> int:
    from ...client.devices import parse_devices

    try:
        print(msgspec.json.encode(parse_devices(text)).decode())
    except InvalidRequest as error:
        print(error)
        return _REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1]))
