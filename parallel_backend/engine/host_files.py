"""Where this host has the files of a request, whose paths are those of ComfyUI's machine.

A model's file is on this host's disk (``model_folders``), or comes there from the first host (``sharing``). The factors
of LoRAs and changed weights only exist in ComfyUI's memory, and come from rank 0. So do models that only exist there.
"""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from .. import env
from ..distributed.collectives import gather_numbers, gather_texts, refused_alike
from ..distributed.file_broadcast import FilesInMemory, broadcast_file, path_of
from ..distributed.mesh import Axis
from ..errors import InvalidRequest
from ..progress import LOADING, PROGRESS, RECEIVING
from ..protocol.messages import RankRequest, Unload
from ..protocol.model_spec import ModelSpec
from ..protocol.request_files import SENT, File, Key, M, files_of, is_only_in_memory, key_of, with_files
from ..step_loop.setting import Report
from .model_folders import find
from .sharing import Sharing, is_allowed, receive

KEPT = 8
"""How many LoRAs and changed weights a host keeps in memory."""


class HostFiles:
    """The files of one rank. All ranks take the same steps, since they get the same requests.

    Args:
        world: all ranks.
        sharing: how hosts that lack a model get it.
    """

    def __init__(self, world: Axis, sharing: Sharing) -> None:
        self._world, self._sharing, self._memory = world, sharing, FilesInMemory()
        self._paths: dict[Key, str] = {}
        self._models: set[Key] = set()
        self._sent: dict[str, str] = {}

    def localised(self, message: M, *, report: Report, cancelled: Callable[[], bool]) -> M:
        """Return a request whose paths are those of this host. Collective over the world where files are new.

        ``report`` and ``cancelled`` are those of ``Engine.handle``.

        Raises:
            InvalidRequest: on all ranks alike; a rank's host lacks a file, or has another one of its name.
            Cancelled: on all ranks alike.
        """
        files = files_of(message)
        new = [file for key, file in files.items() if key not in self._paths]
        if not message.model.content or (new and isinstance(message, Unload)):
            return message
        self._make_room(keep=files)
        with PROGRESS.phase(LOADING):
            for file in new:
                self._paths[key_of(file)] = self._find(file, report, cancelled)
        return with_files(message, lambda file: replace(file, path=self._paths[key_of(file)]))

    def missing(self, message: RankRequest) -> tuple[str, ...]:
        """Return the ids of the files that the client of a request has to send to rank 0."""
        sent = [identity for path, identity in files_of(message) if path == SENT + identity]
        return () if isinstance(message, Unload) else tuple(each for each in sent if each not in self._sent)

    @contextlib.contextmanager
    def receiving(self, identity: str, size: int) -> Iterator[memoryview]:
        """Yield where a file of the client goes, which rank 0 has if nothing fails meanwhile.

        Raises:
            InvalidRequest: the machine's memory has no room for it.
        """
        path, content = self._memory.new_of(size)
        try:
            yield content
        except BaseException:
            self._memory.close(path)
            raise
        self._sent[identity] = path

    def forget(self, model: ModelSpec) -> None:
        """Give a model's file up that only exists in memory: its weights are unloaded."""
        key = next((key for key, path in self._paths.items() if path == model.path and is_only_in_memory(key[0])), None)
        if key is not None:
            self._close(key)

    def original(self, path: str) -> str:
        """Return the path by which requests call a file of this host."""
        return next((theirs for (theirs, _), ours in self._paths.items() if ours == path), path)

    def _find(self, file: File, report: Report, cancelled: Callable[[], bool]) -> str:
        if not isinstance(file, ModelSpec) or is_only_in_memory(file.path):
            path = self._received(file)
        else:
            path = self._on_disk(file, report, cancelled)
        if isinstance(file, ModelSpec):
            self._models.add(key_of(file))
        return path

    def _on_disk(self, model: ModelSpec, report: Report, cancelled: Callable[[], bool]) -> str:
        path, refusal = _found(model)
        with_it = [not text for text in gather_texts(refusal, self._world)]
        if with_it[0] and not all(with_it) and is_allowed(self._sharing, self._world):
            with PROGRESS.phase(RECEIVING):
                error = receive(
                    path, model.content, self._world, self._sharing,
                    lacks=bool(refusal), report=report, cancelled=cancelled,
                )  # fmt: skip
            path, refusal = _found(model)
            failures = [text for text in gather_texts(error if refusal else "", self._world) if text]
            if failures:
                raise InvalidRequest(failures[0])
        with refused_alike(self._world):
            if refusal:
                raise InvalidRequest(refusal)
        return path

    def _received(self, file: File) -> str:
        """Return the path of what rank 0 has: the same on the first host, and a copy in memory on the others."""
        hosts = gather_texts(env.HOST.get(), self._world)
        first_of_host = hosts.index(hosts[self._world.index]) == self._world.index
        source = self._sent.get(key_of(file)[1], "") if file.path.startswith(SENT) else file.path
        into = self._memory.new() if first_of_host and self._world.index > 0 else self._memory.descriptor(source)
        broadcast_file(Path(source), self._world, into if self._world.index > 0 else -1)
        pids = gather_numbers([os.getpid(), into], self._world)
        pid, descriptor = pids[hosts.index(hosts[self._world.index])]
        return path_of(pid, descriptor) if descriptor >= 0 else source

    def _make_room(self, keep: Mapping[Key, File]) -> None:
        """Give the oldest files up that are no models: they are small, and are sent again when they are needed."""
        small = [key for key in self._paths if key not in self._models]
        for key in [key for key in small[:-KEPT] if key not in keep]:
            self._close(key)

    def _close(self, key: Key) -> None:
        path = self._paths.pop(key)
        self._memory.close(path)
        self._sent = {identity: each for identity, each in self._sent.items() if each != path}


def _found(model: ModelSpec) -> tuple[str, str]:
    """Return where this host has a model, and why it has none; one of the two is empty."""
    try:
        return str(find(model)), ""
    except (InvalidRequest, OSError) as error:  # another process may be moving files just now
        return "", str(error)
