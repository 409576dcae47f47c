"""A weight file that changes or fails while it is used is named."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from parallel_backend.checkpoint.safetensors_file import read_header
from parallel_backend.errors import InvalidRequest
from parallel_backend.loading.stored_bytes import opened


def test_a_file_that_was_cut_off_since_its_header_was_read(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(1000)}, file)
    tensor = read_header(file).tensors["a"]
    with opened(tensor) as data:
        assert torch.equal(data, torch.ones(1000))
    os.truncate(file, 2000)
    with pytest.raises(OSError, match=f"{file} was cut off while it was used, and lacks a"), opened(tensor):
        pass
    file.unlink()
    with pytest.raises(FileNotFoundError, match=str(file)), opened(tensor):
        pass


def test_a_disk_that_fails_is_named_with_its_file(tmp_path: Path) -> None:
    """Nobody has mapped the first page of a process, so that reading it gives EIO, as a broken disk does."""
    file = tmp_path / "model.safetensors"
    file.symlink_to("/proc/self/mem")
    with pytest.raises(InvalidRequest, match=rf"{file} cannot be read .*\[Errno 5\] Input/output error"):
        read_header(file)
