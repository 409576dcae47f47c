"""The archive for a bug report: the doctor's lines, status, versions and logs.

It holds no prompts, since no part of the backend writes any, no weights, and neither the home folder's path nor the
names of the user and of this machine.
"""

import importlib.metadata
import os
import platform
import zipfile
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

import msgspec

from ..client import query
from ..client.status_text import format_json
from ..errors import BackendError, InvalidRequest
from ..last_words import tail
from ..protocol.endpoint import Endpoint
from ..protocol.private_file import opener
from .anonymous import Anonymiser
from .finding import Finding
from .runner import CHILD_LOG

_MAX_FILE, _MAX_LOGS = 2 << 20, 64 << 20
"""Bytes of one log and of all logs that the archive takes, counted from their ends and from the newest."""
_SHOWN = ("PARALLEL_DIT_", "CUDA_", "NCCL_", "GLOO_", "TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "HIP_", "ROCR_", "OMP_")
"""Beginnings of the environment variables that it holds."""


def new_file(text: str) -> Path:
    """Make the empty archive that ``--report`` names.

    Raises:
        InvalidRequest: it exists or cannot be made.
    """
    path = Path(text or f"parallel-dit-report-{datetime.now():%Y-%m-%d-%H%M%S}.zip").absolute()
    try:
        open(path, "xb", opener=opener).close()
    except OSError as error:
        raise InvalidRequest(f"--report {path}: {error.strerror}; name a new file in a folder of yours") from error
    return path


def write(path: Path, findings: Sequence[Finding], endpoint: Endpoint, folder: Path) -> None:
    """Fill an archive that ``new_file`` made.

    Args:
        endpoint: whose status and logs it takes.
        folder: the checks' temporary folder, whose logs it takes, too.
    """
    hide = Anonymiser.here()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in _parts(findings, endpoint, folder):
            archive.writestr(name, hide(text))


def _parts(findings: Sequence[Finding], endpoint: Endpoint, folder: Path) -> Iterator[tuple[str, str]]:
    yield "doctor.json", msgspec.json.format(msgspec.json.encode(findings)).decode()
    yield "status.json", status(endpoint)
    yield "versions.txt", _versions()
    shown = sorted(name for name in os.environ if name.startswith(_SHOWN))
    yield "environment.txt", "\n".join(f"{name}={os.environ[name]}" for name in shown)
    yield "doctor.log", tail(folder / CHILD_LOG, _MAX_FILE)
    yield from _logs("logs", endpoint.logs)
    yield from _logs("doctor-logs", Endpoint(folder=folder / "run").logs)


def status(endpoint: Endpoint) -> str:
    """Return the backend's status as JSON, or why there is none."""
    try:
        return format_json(query.status(endpoint))
    except BackendError as error:
        return str(error)


def _versions() -> str:
    packages = {dist.metadata["Name"]: dist.version for dist in importlib.metadata.distributions()}
    lines = [f"Python {platform.python_version()}", f"{platform.system()} {platform.release()} {platform.machine()}"]
    return "\n".join([*lines, *(f"{name}=={packages[name]}" for name in sorted(packages, key=str.lower))])


def _logs(name: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the logs in a folder, the newest first, up to a limit. Links are left out."""
    files = [path for path in folder.glob("*.log*") if path.is_file() and not path.is_symlink()]
    left = _MAX_LOGS
    for path in sorted(files, key=lambda path: path.stat().st_mtime, reverse=True):
        text = tail(path, min(_MAX_FILE, left))
        left -= len(text)
        if text:
            yield f"{name}/{path.name}", text
