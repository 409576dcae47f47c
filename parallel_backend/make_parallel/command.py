"""The command ``python -m parallel_backend make-parallel``."""

import argparse
import json
from pathlib import Path
from typing import Any

from ..errors import InvalidRequest
from .report import Made
from .workflow import make_parallel

MAX_FILE = 64 << 20
"""Bytes of a workflow. One with a picture of its own in it has a few million."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    parser.add_argument(
        "file", metavar="FILE.json", type=Path, help="a workflow, in the page's format or in API format"
    )
    parser.add_argument(
        "--output", metavar="FILE", type=Path,
        help='where to write it, which may be FILE.json itself (default: "FILE (parallel).json" beside it)',
    )  # fmt: skip
    parser.add_argument("--devices", default="all", metavar="LIST", help='for the new nodes (default: "all")')


def run(options: argparse.Namespace) -> int:
    """Write the parallel workflow, and say what stays as it is.

    Raises:
        InvalidRequest: a file cannot be read or written, or holds no workflow.
    """
    source: Path = options.file
    made = make_parallel(_read(source), devices=options.devices)
    target: Path = options.output or source.with_name(f"{source.stem} (parallel){source.suffix}")
    if made.added:
        _write(target, made.workflow)
    print(described(made))
    print(target if made.added else "nothing to do: no file was written")
    return 0


def described(made: Made) -> str:
    """Return a line for each node that was put in, and for each part that stays as it is."""
    return "\n".join(map(str, (*made.added, *made.kept)))


def _read(path: Path) -> Any:
    try:
        if path.stat().st_size > MAX_FILE:
            raise InvalidRequest(f"{path} is larger than {MAX_FILE >> 20} MiB, and no workflow is: name another file")
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}; name a workflow") from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{path} holds no JSON: save the workflow in ComfyUI with Export") from error


def _write(path: Path, workflow: Any) -> None:
    try:
        path.write_text(json.dumps(workflow, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be written: {error.strerror}; name another one with --output") from error
