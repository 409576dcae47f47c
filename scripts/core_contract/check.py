"""Compare a checkout of ComfyUI with the contract."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from scripts import comfy_paths
from scripts.core_contract.core_source import CoreSource
from scripts.core_contract.entry import Entry


@dataclass(frozen=True)
class Difference:
    """One way in which a checkout differs from the contract."""

    entry: Entry
    text: str

    def __str__(self) -> str:
        files = ", ".join(self.entry.files)
        return f"{self.entry.path}: {self.text}. Relied on by {files} ({self.entry.why})."


def asked(entries: Iterable[Entry], comfyui: Path) -> list[Entry]:
    """The entries that apply to a checkout: all except those that are newer than it."""
    release = comfy_paths.release(comfyui)
    return [entry for entry in entries if entry.since <= release]


def differences(entries: Iterable[Entry], comfyui: Path) -> Iterator[Difference]:
    """Yield every difference, in the order of the entries. Imports nothing of ComfyUI."""
    core = CoreSource(comfyui)
    for entry in asked(entries, comfyui):
        yield from (Difference(entry, text) for text in entry.differences(core))
