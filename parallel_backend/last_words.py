"""What the output of a process that has ended says of the reason."""

import signal
from itertools import takewhile
from pathlib import Path

MAX_WORDS = 500
"""Characters of a process's output that reach the client; the log has them all."""
_LINES = 3
"""Lines that are quoted where the output names no reason."""
_ABORT_MARKS = ("Watchdog caught collective operation timeout", "what():")
"""What introduces the reason of an abort: NCCL's watchdog, and a C++ exception that nothing catches."""
_FATAL = "Fatal Python error: "
"""What Python's fault handler prints first of all, when a signal ends the process."""
_BELOW = (
    "frame #", "Exception raised from ", "*** Aborted", "Aborted", "Search for `cuda", "CUDA kernel errors might",
    _FATAL, "Thread 0x", "Current thread", 'File "', "Stack (most recent call first)", "<no Python frame>",
    "Extension modules: ",
)  # fmt: skip
"""Beginnings of lines that come after the reason."""
_BUS_ERROR = "a file that it used was cut off, or its disk failed, or /dev/shm is full"
"""What may end a process by SIGBUS: what it has mapped into its memory cannot be read any more."""
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


def tail(path: Path, limit: int = 256 << 10, *, after: int = 0) -> str:
    """Return the last ``limit`` bytes of a file that come after the first ``after``; "" if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(after, path.stat().st_size - limit))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def last_line(output: str) -> str:
    """Return the last non-blank line of an output, cut to ``MAX_WORDS``; "" if there is none."""
    return next(reversed(_lines(output)), "")[:MAX_WORDS]


def of(returncode: int, output: str) -> str:
    """Return what a process says of why it ended: its reason, or else its last lines; "" if it wrote nothing.

    Args:
        returncode: ``Popen.returncode``.
        output: the end of what it wrote.
    """
    if returncode > 0:
        return last_line(output)
    if returncode == -signal.SIGABRT:
        return abort_reason(output)
    place = _crash_place(output) if -returncode in _CRASHES else ""
    words = place or quoted(output)
    return f"{_BUS_ERROR}{'; ' if words else ''}{words}" if returncode == -signal.SIGBUS else words


def quoted(output: str) -> str:
    """Return the last lines of an output as a clause: ``its last lines: "..."``; "" if there are none."""
    lines = " / ".join(_lines(output)[-_LINES:])
    return f'its last lines: "{lines[-MAX_WORDS:]}"' if lines else ""


def abort_reason(output: str) -> str:
    """Return the lines that say why a process aborted, or "": libraries print stacks below them."""
    lines = _lines(output)
    for mark in _ABORT_MARKS:
        marked = [i for i, line in enumerate(lines) if mark in line]
        if marked:
            first = lines[marked[-1]]
            below = lines[marked[-1] + 1 :] if mark == "what():" else []
            reason = [first[first.index(mark) :].removeprefix("what():").strip()]
            reason += takewhile(lambda line: not line.startswith(_BELOW), below)
            return " ".join(reason)[:MAX_WORDS]
    return next((line for line in reversed(lines) if not line.startswith(_BELOW)), "")[:MAX_WORDS]


def _crash_place(output: str) -> str:
    """Return what Python's fault handler says: the error, and the innermost place in Python's code."""
    lines = _lines(output)
    fatal = next((i for i in reversed(range(len(lines))) if lines[i].startswith(_FATAL)), None)
    if fatal is None:
        return ""
    current = next((i for i in range(fatal, len(lines)) if lines[i].startswith("Current thread")), fatal)
    place = next((line for line in lines[current:] if line.startswith('File "')), "")
    return f"{lines[fatal].removeprefix(_FATAL)}{' in ' if place else ''}{place}"[:MAX_WORDS]


def _lines(output: str) -> list[str]:
    return [line.strip() for line in output.split("\n") if line.strip()]
