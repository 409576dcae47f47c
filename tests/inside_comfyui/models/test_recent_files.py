"""The files in memory that the ranks read: which are kept, and which make room for others."""

import comfy.model_management
import pytest
import torch
from any_folder_name.nodes.backend import session
from any_folder_name.nodes.remote import recent_files
from any_folder_name.nodes.remote.recent_files import RecentFiles
from any_folder_name.nodes.remote.sealed_file import SealedFile, Slot
from any_folder_name.parallel_backend.errors import InvalidRequest

NUMBERS = 1000


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    """Give each test files of its own."""
    session.use(session.Session())


def kept() -> RecentFiles:
    return session.current().part(RecentFiles)


def make(name: str) -> SealedFile:
    """Ask for a file of 4,000 bytes."""
    slots = {"x": Slot(dtype=torch.float32, shape=(NUMBERS,))}
    return kept().get(name, lambda: (SealedFile(slots, {}), [torch.zeros(NUMBERS)]))


def test_the_oldest_files_make_room_by_their_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_files, "_KEPT_BYTES", 6 * 4 * NUMBERS)
    for name in "abcdef":
        make(name)
    assert make("a") is make("a")
    make("g")
    assert list(kept().files) == ["c", "d", "e", "f", "a", "g"]


def test_a_few_files_are_kept_however_large_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_files, "_KEPT_BYTES", 0)
    for name in "abcdef":
        make(name)
    assert list(kept().files) == ["c", "d", "e", "f"]


def test_files_are_freed_before_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    room = 3 * 4 * NUMBERS  # one of them stays free

    def free_memory(device: torch.device) -> int:
        return room - sum(file.nbytes for file in kept().files.values())

    monkeypatch.setattr(comfy.model_management, "get_free_memory", free_memory)
    for name in "abc":
        make(name)
    assert list(kept().files) == ["b", "c"]


def test_a_file_without_room_is_refused_before_it_takes_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comfy.model_management, "get_free_memory", lambda device: 7 * NUMBERS)
    with pytest.raises(InvalidRequest, match=r"take 0.0 GB more, and 0.0 GB of memory are free"):
        make("a")
