"""The corpus: for each target, inputs that are accepted and others that are refused, one a file."""

from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).with_name("corpus")
ACCEPTED, REFUSED = "accepted", "refused"


def made() -> Iterator[tuple[str, str, str, bytes]]:
    """Yield kind, target, name and content of every input that ``seeds`` makes."""
    from .seeds import files, messages

    for kind, seeds in ((ACCEPTED, messages.accepted()), (ACCEPTED, files.accepted())):
        yield from ((kind, target, name, data) for target, each in seeds.items() for name, data in each.items())
    for kind, seeds in ((REFUSED, messages.refused()), (REFUSED, files.refused())):
        yield from ((kind, target, name, data) for target, each in seeds.items() for name, data in each.items())


def inputs(target: str) -> Iterator[tuple[str, str, bytes]]:
    """Yield kind, name and content of every input of a target in the repository."""
    for file in sorted((FOLDER / target).glob("*/*")):
        yield file.parent.name, file.name, file.read_bytes()
