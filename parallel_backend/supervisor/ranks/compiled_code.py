"""Where the ranks of this machine keep compiled code: libraries, and an index that torch unpickles.

torch's own default is a folder in /tmp, whose name another user can take first.
"""

import os
import tempfile
from pathlib import Path

from ...protocol.endpoint import Endpoint
from ...protocol.private_file import FOLDER_MODE, is_private

FOLDER, TRITONS = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
"""The variables for torch's folder and Triton's, which is in torch's by default."""
_CACHES = "XDG_CACHE_HOME"


def keep_compiled_code(endpoint: Endpoint) -> str:
    """Set the folder for the ranks that this process starts, unless the user has set one.

    It is ``parallel-dit/compiled`` among the user's caches. If it cannot be there, it is in the runtime folder, and the
    answer is a sentence that says why; otherwise it is "".

    Raises:
        BackendUnavailable: the runtime folder is needed, and cannot be used.
    """
    _forget_defaults()
    if os.environ.get(FOLDER):
        return ""
    folder, note = _in_caches(), ""
    if reason := _unusable(folder):
        endpoint.prepare()
        chosen = endpoint.folder / folder.name
        folder, note = chosen, f"compiled code is kept in {chosen}, not in {folder}: {reason}"
    os.environ[FOLDER] = str(folder)
    return note


def _forget_defaults() -> None:
    """Remove torch's defaults, which are in the environment of a ComfyUI that has compiled something itself."""
    for name in (FOLDER, TRITONS):
        if os.environ.get(name, "").startswith(os.path.join(tempfile.gettempdir(), "torchinductor_")):
            del os.environ[name]


def _in_caches() -> Path:
    caches = os.environ.get(_CACHES, "")
    base = Path(caches) if os.path.isabs(caches) else Path(os.path.expanduser("~")) / ".cache"
    return base / "parallel-dit" / "compiled"


def _unusable(folder: Path) -> str:
    """Make a folder, and return why it cannot be used; "" if it can."""
    if not folder.is_absolute():
        return "this user has no home folder"
    try:
        folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        private = is_private(folder.lstat())
    except OSError as error:
        return f"it cannot be made ({error.strerror})"
    if not private:
        return "it is no folder that this user owns, with mode 0700"
    return "" if os.access(folder, os.W_OK) else "it cannot be written to"
