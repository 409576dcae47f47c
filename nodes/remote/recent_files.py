"""The files in memory that recent samplings had the ranks read, by the hash of their content.

So a workflow that runs again, with another seed or strength or with several MODELs in turn, writes nothing again. A
file that is freed here lives on as long as anything holds it, so ask for it again before every request.
"""

from collections.abc import Callable, Iterable

import comfy.model_management
import torch
from torch import Tensor

from ...parallel_backend.errors import InvalidRequest
from .sealed_file import SealedFile

_KEPT_SAMPLINGS = 4
"""A file is freed when this many samplings have not used it."""

_KEPT_FILES, _KEPT_BYTES = 4, 16 << 30
"""Before a file is made, others are freed while both limits are exceeded: the number of files, and their bytes."""

_SPARE = 1 << 30
"""Bytes of memory that must stay free besides a file; as many as the file has, if it has fewer."""


class RecentFiles:
    """The files of a session. The one that was used last comes last."""

    def __init__(self) -> None:
        self.files: dict[str, SealedFile] = {}
        self._last_use: dict[str, int] = {}
        self._samplings = 0

    def get(self, file_id: str, make: Callable[[], tuple[SealedFile, Iterable[Tensor]]]) -> SealedFile:
        """Return the file with this id.

        Args:
            make: called if there is none. Returns a file without content, and the content.

        Raises:
            InvalidRequest: there is no memory for it, even if all files are freed that nothing holds.
        """
        if file_id in self.files:
            file = self.files.pop(file_id)
        else:
            file, tensors = make()
            self._make_room(file.nbytes)
            file.fill(tensors)
        self.files[file_id] = file
        self._last_use[file_id] = self._samplings
        return file

    def begin_sampling(self) -> None:
        """Free the files that recent samplings did not use."""
        self._samplings += 1
        for file_id in [each for each, used in self._last_use.items() if used <= self._samplings - _KEPT_SAMPLINGS]:
            self._free(file_id)

    def _make_room(self, nbytes: int) -> None:
        """Free files, those first that were not used for the longest time. A schedule makes a file a step."""
        for file_id in list(self.files):
            kept = sum(file.nbytes for file in self.files.values()) + nbytes
            if _fits(nbytes) and (len(self.files) < _KEPT_FILES or kept <= _KEPT_BYTES):
                return
            self._free(file_id)
        if not _fits(nbytes):
            raise InvalidRequest(
                f"the weights that nodes change take {nbytes / 1e9:.1f} GB more, and {_free_memory() / 1e9:.1f} GB of "
                "memory are free: use fewer of these LoRAs, or a plain one, whose factors take less"
            )

    def _free(self, file_id: str) -> None:
        del self.files[file_id], self._last_use[file_id]


def _fits(nbytes: int) -> bool:
    return nbytes + min(nbytes, _SPARE) <= _free_memory()


def _free_memory() -> int:
    available: int = comfy.model_management.get_free_memory(torch.device("cpu"))
    return available
