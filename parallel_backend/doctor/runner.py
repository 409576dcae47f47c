"""Run checks in a process of their own, each with a deadline."""

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from pathlib import Path

import msgspec

from .. import env, processes
from ..client.launch import with_backend
from .finding import Check, Finding, Setting

CHILD_LOG = "doctor.log"
"""What checks write to stdout and stderr, in the setting's folder."""
_END = 5.0
"""Seconds that a process has to end after SIGTERM."""


def examine(checks: Sequence[Check], setting: Setting) -> Generator[list[Finding], None, None]:
    """Yield the findings of each check. One that hangs or ends its process is broken, and the next ones run anew."""
    left = list(checks)
    while left:
        with _Child(left, setting) as child:
            while left:
                found = child.next(left[0])
                yield found.findings
                del left[0]
                if found.ended:
                    break


class _Found:
    def __init__(self, findings: list[Finding], *, ended: bool = False) -> None:
        self.findings, self.ended = findings, ended


class _Child:
    """A process that runs checks in turn."""

    def __init__(self, checks: Sequence[Check], setting: Setting) -> None:
        self._pipe, write_end = os.pipe2(os.O_CLOEXEC)
        self._buffer = b""
        python = env.PYTHON.get() or sys.executable  # the one that the backend runs with
        command = [python, "-m", f"{__package__}.child", str(write_end)]
        command += [msgspec.json.encode(part).decode() for part in (setting, list(checks))]
        try:
            with (Path(setting.folder) / CHILD_LOG).open("ab") as output:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=[write_end],
                    env=with_backend(),
                )  # fmt: skip
        except BaseException:
            os.close(self._pipe)
            raise
        finally:
            os.close(write_end)

    def __enter__(self) -> "_Child":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._pipe)
        if self._process.poll() is None:
            self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END)
            return
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may keep it for longer
            self._process.wait(_END)

    def next(self, check: Check) -> _Found:
        """Wait for the findings of the check that runs now."""
        line = self._line(check.seconds)
        if line:
            return _Found(msgspec.json.decode(line, type=list[Finding]))
        if line is None:
            text = f"it did not end within {check.seconds:g} s"
            return _Found([_broken(check, text, _HANGS)], ended=True)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END)
        how = processes.describe_exit(self._process.returncode or 0)
        return _Found([_broken(check, f"the process that checked it {how}", _ENDS)], ended=True)

    def _line(self, seconds: float) -> bytes | None:
        """Return the next line; b"" if the process has ended, None if none came in time."""
        poller, end = select.poll(), time.monotonic() + seconds
        poller.register(self._pipe, select.POLLIN)
        while b"\n" not in self._buffer:
            if not poller.poll(max(0.0, end - time.monotonic()) * 1000):
                return None
            chunk = os.read(self._pipe, 65536)
            if not chunk:
                return b""
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


_HANGS = "A driver or a disk may hang: see dmesg, and restart the machine if it does not recover."
_ENDS = "A library or a driver ended it: see the archive of --report, and dmesg."


def _broken(check: Check, text: str, advice: str) -> Finding:
    return Finding(check=check.name, verdict="broken", text=text, advice=advice)
