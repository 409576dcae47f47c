"""What weight files hold, whatever their format: every tensor by name, with its shape once decoded. No torch."""

from collections.abc import Iterable
from pathlib import Path

from .quantised import MARK, with_compression
from .safetensors_file import read_header
from .stored_tensor import Header, StoredTensor

GGUF_SUFFIX = ".gguf"


def read_file(file: Path) -> Header:
    """Read a file's header.

    Raises:
        InvalidRequest: the file cannot be read, or its header is wrong.
    """
    if file.suffix.lower() == GGUF_SUFFIX:
        from .gguf_file import read_gguf

        return read_gguf(file)
    return read_header(file)


def read_files(files: Iterable[Path]) -> Header:
    """Read the headers of files that are one model."""
    headers = [read_file(file) for file in files]
    return Header(
        tensors={name: tensor for header in headers for name, tensor in header.tensors.items()},
        metadata={name: text for header in headers for name, text in header.metadata.items()},
        layers=tuple(text for header in headers for text in header.layers),
    )


def weights_under(prefix: str, header: Header) -> dict[str, StoredTensor]:
    """Return the weights whose names begin with a prefix, by the rest of their names.

    Raises:
        InvalidRequest: a compressed weight lacks a scale, or has an unknown format.
    """
    under = {name.removeprefix(prefix): each for name, each in header.tensors.items() if name.startswith(prefix)}
    if MARK in header.tensors:  # which some files have before the names' beginning, too
        under.setdefault(MARK, header.tensors[MARK])
    return with_compression(under, header.layers, prefix)
