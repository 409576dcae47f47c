"""What every entry of the contract has, whatever its kind."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace

from scripts.core_contract.core_source import CoreSource, Found

Release = tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class Entry(ABC):
    """One thing in ComfyUI that this project relies on.

    Attributes:
        by: files of this repository that rely on it, relative to its root, separated by spaces.
        why: what those files need it for, in a few words.
        module: the module of ComfyUI that it belongs to; ``core_module`` sets it.
        since: the first release that has it. Older checkouts are not checked for it.
        optional: whether our code copes without it. Where it exists, it still has to be as listed.
        word: what the files in ``by`` call it, if not by its name in ComfyUI. Spaces separate several words.
    """

    by: str
    why: str
    module: str = ""
    since: Release = ()
    optional: bool = False
    word: str = ""

    @property
    @abstractmethod
    def name(self) -> str:
        """The name inside ``module`` that the entry is about; empty for the module itself."""

    @property
    @abstractmethod
    def default_words(self) -> list[str]:
        """Identifiers and strings that appear in a file that relies on the entry."""

    @abstractmethod
    def compare(self, core: CoreSource, found: Found) -> Iterator[str]:
        """Yield one sentence for each way in which ``found``, which has the entry's name, is not as listed."""

    def differences(self, core: CoreSource) -> Iterator[str]:
        """Yield one sentence for each way in which a checkout differs from this entry."""
        found = self.find(core)
        if found is not None:
            yield from self.compare(core, found)
        elif not self.optional:
            yield self.missing(core)

    def find(self, core: CoreSource) -> Found | None:
        """What the checkout has under the entry's name; None if there is nothing."""
        return core.find(self.path)

    def missing(self, core: CoreSource) -> str:
        """A sentence that the name is missing, with other places where core has a name like it."""
        if core.module(self.module) is None:
            return f"there is no module {self.module}"
        owner, _, name = self.path.rpartition(".")
        holder = core.find(owner)
        expected = f"it is missing from {holder.place}" if holder else f"{owner} is missing"
        return expected + (moved(core, name) if owner == self.module else "")

    @property
    def path(self) -> str:
        """The dotted name in ComfyUI."""
        return ".".join(part for part in (self.module, self.name) if part)

    @property
    def paths(self) -> list[str]:
        """Every dotted name that the entry lists."""
        return [self.path]

    @property
    def files(self) -> list[str]:
        """The files that rely on it."""
        return self.by.split()

    @property
    def words(self) -> list[str]:
        """Words that the files in ``by`` contain. A test fails for an entry whose words are gone."""
        return self.word.split() or self.default_words


def moved(core: CoreSource, name: str) -> str:
    """The end of a sentence about a missing name: where else core defines one like it. Empty if nowhere."""
    places = core.elsewhere(name)
    return f"; there is one in {', '.join(places[:3])}" if places else ""


def core_module(name: str, *entries: Entry) -> tuple[Entry, ...]:
    """Entries of one module of ComfyUI."""
    return tuple(replace(entry, module=name) for entry in entries)
