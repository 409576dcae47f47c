"""Where this host has the files of a request, whose paths are those of ComfyUI's machine.

A model's file is the one at the same path, or one of the same name in a folder of ``PARALLEL_DIT_MODELS``. The factors
of LoRAs and changed weights only exist in ComfyUI's memory, and come from rank 0. So do models that only exist there.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from ..checkpoint.opening import open_checkpoint
from ..checkpoint.single_file import is_in_memory
from ..distributed.collectives import gather_numbers, gather_texts, refused_alike
from ..distributed.file_broadcast import FilesInMemory, broadcast_file, path_of
from ..distributed.mesh import Axis
from ..errors import InvalidRequest
from ..progress import LOADING, PROGRESS
from ..protocol.messages import RankRequest, Unload
from ..protocol.model_spec import FIRST, HOST, Adapter, ModelSpec, Overlay

FOLDERS = "PARALLEL_DIT_MODELS"
_COMFYUI = Path(__file__).resolve().parents[3]

KEPT = 8
"""How many LoRAs and changed weights a host keeps in memory."""

Named = ModelSpec | Adapter | Overlay
_Key = tuple[str, str]
M = TypeVar("M", bound=RankRequest)


class HostFiles:
    """The files of one rank. All ranks take the same steps, since they get the same requests.

    Args:
        world: all ranks.
    """

    def __init__(self, world: Axis) -> None:
        self._world, self._memory = world, FilesInMemory()
        self._paths: dict[_Key, str] = {}
        self._models: set[_Key] = set()

    def localised(self, message: M) -> M:
        """Return a request whose paths are those of this host. Collective over the world where files are new.

        Raises:
            InvalidRequest: on all ranks alike; a rank's host lacks a file, or has another one of its name.
        """
        files = _files(message)
        new = [file for key, file in files.items() if key not in self._paths]
        if not message.model.content or (new and isinstance(message, Unload)):
            return message
        self._make_room(keep=files)
        with PROGRESS.phase(LOADING):
            for file in new:
                self._paths[_key(file)] = self._find(file)
        return _changed(message, lambda file: replace(file, path=self._paths[_key(file)]))

    def forget(self, model: ModelSpec) -> None:
        """Give a model's file up that only exists in memory: its weights are unloaded."""
        key = next((key for key, path in self._paths.items() if path == model.path and is_in_memory(key[0])), None)
        if key is not None:
            self._memory.close(self._paths.pop(key))

    def original(self, path: str) -> str:
        """Return the path by which requests call a file of this host."""
        return next((theirs for (theirs, _), ours in self._paths.items() if ours == path), path)

    def _find(self, file: Named) -> str:
        if isinstance(file, ModelSpec):
            self._models.add(_key(file))
        if not isinstance(file, ModelSpec) or is_in_memory(file.path):
            return self._received(file)
        path = ""
        with refused_alike(self._world):
            path = str(_on_disk(file, os.environ.get(HOST, FIRST)))
        return path

    def _received(self, file: Named) -> str:
        """Return the path of what rank 0 has: the same on the first host, and a copy in memory on the others."""
        hosts = gather_texts(os.environ.get(HOST, FIRST), self._world)
        first_of_host = hosts.index(hosts[self._world.index]) == self._world.index
        keeps = first_of_host and self._world.index > 0
        copy = broadcast_file(Path(file.path), self._world, self._memory.new() if keeps else None)
        pids = gather_numbers([os.getpid(), copy], self._world)
        pid, descriptor = pids[hosts.index(hosts[self._world.index])]
        return path_of(pid, descriptor) if descriptor >= 0 else file.path

    def _make_room(self, keep: Mapping[_Key, Named]) -> None:
        """Give the oldest files up that are no models: they are small, and are sent again when they are needed."""
        small = [key for key in self._paths if key not in self._models]
        for key in [key for key in small[:-KEPT] if key not in keep]:
            self._memory.close(self._paths.pop(key))


def _files(message: RankRequest) -> dict[_Key, Named]:
    """Return the files of a request, each once and in the same order on every rank."""
    found: dict[_Key, Named] = {}

    def add(file: Named) -> Named:
        found.setdefault(_key(file), file)
        return file

    _changed(message, add)
    return found


def _changed(message: M, change: Callable[[Any], Any]) -> M:
    """Return a request with all of its files changed."""
    changes: dict[str, Any] = {"model": change(message.model)}
    for name in ("adapters", "overlay"):
        value = getattr(message, name, None)
        if value:
            changes[name] = _mapped(value, change)
    return replace(message, **changes)


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    return tuple(_mapped(each, change) for each in value) if isinstance(value, tuple) else change(value)


def _key(file: Named) -> _Key:
    return file.path, file.content if isinstance(file, ModelSpec) else file.id


def _on_disk(file: ModelSpec, host: str) -> Path:
    """Return where this host has a model.

    Raises:
        InvalidRequest: it has none of this name, or only others.
    """
    path, here = Path(file.path), f"host {host}" if host else "the first host"
    candidates = [each for each in (path, *_named(path.name)) if each.exists()]
    for candidate in candidates:
        if open_checkpoint(candidate).content() == file.content:
            return candidate
    if candidates:
        raise InvalidRequest(
            f"{here} has another {path.name} ({candidates[0]}) than ComfyUI: copy the file there again"
        )
    raise InvalidRequest(
        f"{here} has no {path.name}: copy it there, to {path} or into a folder of {FOLDERS} ({_text(_folders())})"
    )


def _named(name: str) -> Iterator[Path]:
    for folder in _folders():
        yield from sorted(folder.rglob(name))


def _folders() -> Sequence[Path]:
    """The folders in which models are looked for: those that are named, or those of the ComfyUI around this folder."""
    named = os.environ.get(FOLDERS)
    if named:
        return [Path(each) for each in named.split(os.pathsep) if each]
    around = _COMFYUI.parent if _COMFYUI.name == "custom_nodes" else None
    return [around / "models"] if around else []


def _text(folders: Sequence[Path]) -> str:
    return ", ".join(map(str, folders)) or "which is not set"
