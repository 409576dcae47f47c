"""Opens a model on disk, whatever its form."""

from pathlib import Path

from .checkpoint import Checkpoint
from .diffusers_folder import DiffusersFolder
from .single_file import SingleFile


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a folder in diffusers layout, or a safetensors or GGUF file in original or diffusers' names.

    Raises:
        InvalidRequest: it cannot be used. The message says why, and what would work.
    """
    path = Path(path)
    return SingleFile(path) if path.is_file() else DiffusersFolder(path)
