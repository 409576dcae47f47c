"""The runtime folder, and the backend that runs there."""

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from ...client import query
from ...errors import BackendError, BackendUnavailable
from ...protocol.endpoint import Endpoint, passed_over
from ..finding import Finding, Setting

_ROOM = 100e6
"""Bytes free for logs."""
_NAME = "runtime folder"


def runtime_folder(_: Setting) -> list[Finding]:
    """Who may enter the runtime folder and the logs, and whether they have room."""
    endpoint = Endpoint.default()
    if endpoint.remote is not None:
        return [Finding.not_here(f"the backend is on another machine, at {endpoint.remote}")]
    endpoint.prepare()
    open_to_others = list(_open_to_others(endpoint))
    if open_to_others:
        text = f"other users may read {', '.join(open_to_others)}"
        return [Finding.broken(text, f"chmod -R go= {endpoint.folder} {endpoint.logs}")]
    unwritable = [path for path in (endpoint.folder, _nearest(endpoint.logs)) if not os.access(path, os.W_OK)]
    if unwritable:
        advice = "Make it writable, or set PARALLEL_DIT_RUNTIME or PARALLEL_DIT_LOGS to another folder."
        return [Finding.broken(f"{unwritable[0]} is not writable", advice)]
    free = shutil.disk_usage(_nearest(endpoint.logs)).free
    if free < _ROOM:
        text = f"{free / 1e6:.0f} MB are free for the logs in {endpoint.logs}"
        return [Finding.slow(text, "Free some space, or set PARALLEL_DIT_LOGS to a folder on another disk.")]
    text = ", ".join(filter(None, (str(endpoint.folder), f"logs in {endpoint.logs}", passed_over(endpoint))))
    return [Finding.fine(text)]


def _open_to_others(endpoint: Endpoint) -> Iterator[str]:
    """Yield what other users have access to. ``Endpoint.prepare`` has checked the runtime folder itself."""
    for path in (endpoint.socket, endpoint.lock, endpoint.logs, *endpoint.logs.glob("*.log*")):
        try:
            mode = path.lstat().st_mode
        except OSError:
            continue
        # A folder of logs that the user has chosen may be shared; its files may not.
        if stat.S_IMODE(mode) & 0o077 and not (path == endpoint.logs and endpoint.log_folder):
            yield f"{path} (mode {stat.S_IMODE(mode):04o})"


def _nearest(path: Path) -> Path:
    """Return a path, or the folder above it in which it would be made."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def backend(_: Setting) -> list[Finding]:
    """What the running backend says."""
    stop = "python -m parallel_backend stop ends it, and the next prompt starts a new one."
    try:
        status = query.status(Endpoint.default())
    except BackendUnavailable as error:
        if Endpoint.default().remote is not None:
            return [Finding.broken(str(error), "Start it on its machine.")]
        return [Finding.fine("none runs: the first node that needs it starts it")]
    except BackendError as error:
        return [Finding.broken(str(error), stop)]
    text = f"pid {status.pid}, {status.state}, {len(status.ranks)} ranks, generation {status.generation}"
    if status.log_problem:
        advice = f"Make room or make it writable: {status.logs}"
        return [Finding.slow(f"{text}; in its logs {status.log_problem}", advice)]
    return [Finding.fine(text)]
