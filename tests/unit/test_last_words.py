"""What the output of a process that has ended says of the reason."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from parallel_backend import last_words

STACK = "Exception raised from run at x.cpp:1\nframe #0: c10::Error + 0x1\nframe #1: clone3\n\n"
CRASHES = """
import faulthandler, ctypes, os, sys
faulthandler.enable()
print("a line before", file=sys.stderr, flush=True)
def inner():
    {}
inner()
"""


def output_of(body: str) -> tuple[int, str]:
    """Return the status and the output of a process whose innermost function does this."""
    done = subprocess.run(
        [sys.executable, "-c", CRASHES.format(body)], stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )
    return done.returncode, done.stderr


def test_the_last_line():
    assert last_words.last_line("") == ""
    assert last_words.last_line("first\n" * 10 + "ValueError: at last\n\n") == "ValueError: at last"
    assert len(last_words.last_line("x" * 10_000)) == last_words.MAX_WORDS


def test_the_end_of_a_file(tmp_path: Path):
    assert last_words.tail(tmp_path / "none") == ""
    file = tmp_path / "file"
    file.write_text("0123456789")
    assert last_words.tail(file, 3) == "789"
    assert last_words.tail(file, 100, after=4) == "456789"


def test_why_a_process_aborted():
    assert last_words.abort_reason("") == ""
    assert last_words.abort_reason("first\nmalloc(): corrupted top size\n" + STACK) == "malloc(): corrupted top size"
    thrown = "terminate called\n  what():  CUDA error: an illegal address\n" + STACK
    assert last_words.abort_reason(thrown) == "CUDA error: an illegal address"
    caught = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5)"
    log = f"[E1] [Rank 1] {caught}\n" + STACK + "what():  [PG ID 3] something later\n" + STACK
    assert last_words.abort_reason(log) == caught


def test_an_abort_below_which_the_fault_handler_prints():
    status, output = output_of('print("corrupted top size", file=sys.stderr, flush=True); os.abort()')
    assert "Fatal Python error: Aborted" in output
    assert last_words.of(status, output) == "corrupted top size"


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL])
def test_a_crash_names_its_place(number: signal.Signals):
    status, output = output_of(f"os.kill(os.getpid(), {int(number)})")
    assert status == -number
    said = last_words.of(status, output)
    assert said.endswith(' in File "<string>", line 6 in inner')
    said = said.removeprefix("a file that it used was cut off, or its disk failed, or /dev/shm is full; ")
    assert said[0].isupper()


def test_other_ends_quote_the_last_lines():
    assert last_words.of(-signal.SIGKILL, "a\nb\n\nc\nd\n") == 'its last lines: "b / c / d"'
    assert last_words.of(-signal.SIGKILL, "\n") == ""
    assert last_words.of(3, "a\nb\n") == "b"
    assert len(last_words.of(-signal.SIGKILL, "x" * 10_000)) < last_words.MAX_WORDS + 30
