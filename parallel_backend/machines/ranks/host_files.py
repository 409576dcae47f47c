"""Finds a request's files on this host. The request has paths of ComfyUI's machine.

A model's file is on this host's disk (``model_folders``). LoRAs' factors, changed weights and some models exist only in
ComfyUI's memory, and come from rank 0.
"""

import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from ... import env
from ...distributed.collectives import gather_numbers, gather_texts, refused_alike
from ...distributed.mesh import Axis
from ...errors import InvalidRequest
from ...progress import LOADING, PROGRESS
from ...protocol.deadlines import Deadline
from ...protocol.messages import RankRequest, Unload
from ...protocol.model_spec import ModelSpec
from ..links.request_files import SENT, File, Key, M, files_of, is_only_in_memory, key_of, with_files
from .file_broadcast import FilesInMemory, broadcast_file, path_of
from .model_folders import find
from .received_files import receive_files

KEPT = 8
"""How many LoRAs and changed weights a host keeps in memory."""


class HostFiles:
    """The files of one rank. All ranks take the same steps, since they get the same requests.

    Args:
        world: all ranks.
    """

    def __init__(self, world: Axis) -> None:
        self._world, self._memory = world, FilesInMemory()
        self._paths: dict[Key, str] = {}
        self._models: set[Key] = set()
        self._sent: dict[str, str] = {}

    def localised(self, message: M) -> M:
        """Return a request with this host's paths. Collective over the world if it names new files.

        Raises:
            InvalidRequest: on all ranks alike; a rank's host lacks a file, or has another one with its name.
        """
        files = files_of(message)
        new = [file for key, file in files.items() if key not in self._paths]
        if not message.model.content or (new and isinstance(message, Unload)):
            return message
        self._make_room(keep=files)
        with PROGRESS.phase(LOADING):
            for file in new:
                self._paths[key_of(file)] = self._find(file)
        return with_files(message, lambda file: replace(file, path=self._paths[key_of(file)]))

    def missing(self, message: RankRequest) -> tuple[str, ...]:
        """Return the ids of the files that the client of a request has to send to rank 0."""
        sent = [identity for path, identity in files_of(message) if path == SENT + identity]
        return () if isinstance(message, Unload) else tuple(each for each in sent if each not in self._sent)

    def receive(
        self, connection: socket.socket, wanted: tuple[str, ...], *, deadline: Deadline, poll: Callable[[], None]
    ) -> None:
        """Receive files from the client of a request, see ``receive_files``."""
        receive_files(connection, wanted, self._receiving, deadline=deadline, poll=poll)

    @contextlib.contextmanager
    def _receiving(self, identity: str, size: int) -> Iterator[memoryview]:
        """Yield memory for a client's file. Rank 0 keeps the file if nothing fails meanwhile.

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
        """Free a model's file in memory after its weights are unloaded."""
        key = next((key for key, path in self._paths.items() if path == model.path and is_only_in_memory(key[0])), None)
        if key is not None:
            self._close(key)

    def original(self, path: str) -> str:
        """Return the path that requests use for a file of this host."""
        return next((theirs for (theirs, _), ours in self._paths.items() if ours == path), path)

    def _find(self, file: File) -> str:
        if not isinstance(file, ModelSpec) or is_only_in_memory(file.path):
            path = self._received(file)
        else:
            path = self._on_disk(file)
        if isinstance(file, ModelSpec):
            self._models.add(key_of(file))
        return path

    def _on_disk(self, model: ModelSpec) -> str:
        path = ""
        with refused_alike(self._world):
            try:
                path = str(find(model))
            except OSError as error:  # another process may be moving files just now
                raise InvalidRequest(str(error)) from error
        return path

    def _received(self, file: File) -> str:
        """Return the path of rank 0's file: itself on the first host, a copy in memory on others."""
        hosts = gather_texts(env.HOST.get(), self._world)
        first_of_host = hosts.index(hosts[self._world.index]) == self._world.index
        source = self._sent.get(key_of(file)[1], "") if file.path.startswith(SENT) else file.path
        into = self._memory.new() if first_of_host and self._world.index > 0 else self._memory.descriptor(source)
        broadcast_file(Path(source), self._world, into if self._world.index > 0 else -1)
        pids = gather_numbers([os.getpid(), into], self._world)
        pid, descriptor = pids[hosts.index(hosts[self._world.index])]
        return path_of(pid, descriptor) if descriptor >= 0 else source

    def _make_room(self, keep: Mapping[Key, File]) -> None:
        """Free the oldest files that are not models: they are small, and are sent again when needed."""
        small = [key for key in self._paths if key not in self._models]
        for key in [key for key in small[:-KEPT] if key not in keep]:
            self._close(key)

    def _close(self, key: Key) -> None:
        path = self._paths.pop(key)
        self._memory.close(path)
        self._sent = {identity: each for identity, each in self._sent.items() if each != path}
