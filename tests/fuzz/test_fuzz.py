"""The fuzzer finds nothing in a short run, and finds bugs that are planted, without an input that shows them."""

import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from .fuzzing import copy_with_bug, fuzz, is_available
from .seed_files import ACCEPTED
from .targets import TARGETS

pytestmark = pytest.mark.skipif(not is_available(), reason="atheris is not installed for this Python")

SHORT = 1.0
"""Seconds for each target, beside the start of its process; `python -m tests.fuzz` takes more."""


def test_a_short_run_finds_nothing(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        results = dict(
            zip(TARGETS, pool.map(lambda name: fuzz(name, seconds=SHORT, kept=tmp_path), TARGETS), strict=True)
        )
    for name, result in results.items():
        assert not result.findings, f"{name}: {result.findings[0]}"
        assert result.executions > 300, name
        # Nearly all of an agent's message is read by msgspec, which is not measured.
        assert result.features > (15 if name == "agent" else 30), name


@dataclass(frozen=True, kw_only=True)
class Bug:
    """A check that is taken away, and what the fuzzer says then."""

    target: str
    file: str
    check: str
    bug: str
    finding: str


BUGS = {
    "header_length": Bug(
        target="stream",
        file="protocol/frames.py",
        check="if not 0 < length <= MAX_HEADER:",
        bug="if not 0 < length:",
        finding="MemoryError",
    ),
    "nested_message": Bug(
        target="message",
        file="protocol/frames.py",
        check="except RecursionError as error:",
        bug="except ZeroDivisionError as error:",
        finding="RecursionError",
    ),
    "negative_size": Bug(
        target="message",
        file="protocol/frames.py",
        check="any(not 0 <= size <= MAX_PAYLOAD for size in self.shape)",
        bug="any(size > MAX_PAYLOAD for size in self.shape)",
        finding="Finding: a strange size",
    ),
    "nested_datagram": Bug(
        target="control",
        file="protocol/rank_control.py",
        check="except (ValueError, RecursionError) as error:",
        bug="except ValueError as error:",
        finding="RecursionError",
    ),
    "overlap": Bug(
        target="safetensors",
        file="checkpoint/safetensors_file.py",
        check="if start != position or end < start:",
        bug="if end < start:",
        finding="Finding: (two tensors overlap|a gap|beyond the file)",
    ),
    "header_beyond_file": Bug(
        target="safetensors",
        file="checkpoint/safetensors_file.py",
        check="if length > min(_MAX_HEADER, size - 8):",
        bug="if size < 8:",
        finding="OverflowError|MemoryError|memory was asked for",
    ),
    "gguf_overlap": Bug(
        target="gguf",
        file="checkpoint/gguf_file.py",
        check="if tensor.offset < end or tensor.offset + tensor.bytes > size:",
        bug="if tensor.offset + tensor.bytes > size:",
        finding="Finding: two tensors overlap",
    ),
    "nested_metadata": Bug(
        target="changes",
        file="checkpoint/safetensors_file.py",
        check="except (KeyError, ValueError, RecursionError) as error:",
        bug="except (KeyError, ValueError) as error:",
        finding="RecursionError",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str, tmp_path: Path) -> None:
    """From inputs that are accepted alone: those that are refused would show it at once."""
    bug = BUGS[name]
    root = copy_with_bug(tmp_path / "copy", bug.file, bug.check, bug.bug)
    result = fuzz(bug.target, seconds=60.0, kept=tmp_path, kinds=[ACCEPTED], seed=1, root=root)
    assert len(result.findings) == 1, f"{result.executions} inputs found nothing"
    assert re.search(bug.finding, result.findings[0]), result.findings[0]
