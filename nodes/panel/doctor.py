"""Runs the doctor for the panel, as a process of its own: it imports what ComfyUI's process does not."""

import asyncio
import contextlib
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process

from ...parallel_backend import env
from ...parallel_backend.client.launch import with_backend
from ...parallel_backend.errors import BackendFailure, DeadlineExceeded

DEADLINE = 600.0
"""Seconds that all checks may take together; each has a shorter deadline of its own."""


class Doctor:
    """One run at a time, whoever asks."""

    def __init__(self, deadline: float = DEADLINE) -> None:
        self._deadline, self._running = deadline, False

    async def run(self, option: str) -> str:
        """Return what ``doctor`` prints with an option.

        Raises:
            BackendFailure: it runs already, or does not work.
            DeadlineExceeded: it takes too long.
        """
        if self._running:
            raise BackendFailure("the doctor is at work already: wait until it is done")
        self._running = True
        try:
            return await self._output(option)
        finally:
            self._running = False

    async def _output(self, option: str) -> str:
        command = [env.PYTHON.get() or sys.executable, "-m", "parallel_backend", "doctor", option]
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.DEVNULL, stdout=PIPE, stderr=PIPE, env=with_backend(),
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise BackendFailure(f"{command[0]} does not start: {error.strerror}") from error
        try:
            output, errors = await asyncio.wait_for(process.communicate(), self._deadline)
        except asyncio.TimeoutError as error:
            raise DeadlineExceeded(
                f"the doctor is not done after {self._deadline:g} s: run python -m parallel_backend doctor"
            ) from error
        finally:
            _end(process)
        if not output.strip():
            last = errors.decode(errors="replace").strip().splitlines()[-1:]
            raise BackendFailure(f"the doctor does not work: {last[0] if last else 'it printed nothing'}")
        return output.decode(errors="replace")


def _end(process: Process) -> None:
    """End a run that was given up, with its children: its browser has gone, or it takes too long."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
