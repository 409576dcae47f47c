"""The files that a request names: its model, LoRAs and changed weights.

Some exist only in ComfyUI's memory, at a path of its process that another machine cannot read. A client of a backend
there names them ``sent:ID`` instead, and sends the files that rank 0 asks for.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

from ...checkpoint.single_file import is_in_memory
from ...protocol.messages import RankRequest
from ...protocol.model_spec import Adapter, ModelSpec, Overlay

SENT = "sent:"
"""How the path of a file begins that comes with the request, if rank 0 does not have it."""

File = ModelSpec | Adapter | Overlay
Key = tuple[str, str]
"""Path and content."""
M = TypeVar("M", bound=RankRequest)


def key_of(file: File) -> Key:
    """Identifies a file."""
    return file.path, file.content if isinstance(file, ModelSpec) else file.id


def files_of(message: RankRequest) -> dict[Key, File]:
    """Return the files of a request, each once and always in the same order."""
    found: dict[Key, File] = {}

    def add(file: File) -> File:
        found.setdefault(key_of(file), file)
        return file

    with_files(message, add)
    return found


def with_files(message: M, change: Callable[[Any], Any]) -> M:
    """Return a request with all of its files replaced."""
    changes: dict[str, Any] = {"model": change(message.model)}
    for name in ("adapters", "overlay"):
        value = getattr(message, name, None)
        if value:
            changes[name] = _mapped(value, change)
    return replace(message, **changes)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    return tuple(_mapped(each, change) for each in value) if isinstance(value, tuple) else change(value)


def is_only_in_memory(path: str) -> bool:
    """Whether the file exists only in memory."""
    return path.startswith(SENT) or is_in_memory(path)


def to_be_sent(message: M) -> tuple[M, dict[str, str]]:
    """Return a request for a backend on another machine, and the paths of the files to offer it, by id."""
    paths: dict[str, str] = {}

    def change(file: File) -> File:
        if not is_in_memory(file.path):
            return file
        _, identity = key_of(file)
        paths[identity] = file.path
        return replace(file, path=SENT + identity)

    return with_files(message, change), paths
