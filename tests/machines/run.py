"""A run of ``sampling.py`` on a host of a test network."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from scripts.processes import wait_until

from .backend import PYTHON, Backend
from .hosts import Host

SECONDS = 240.0
ODD = "1x9x7"
"""Frames, height and width of latents whose tokens divide by no number of ranks."""


class Run:
    """A program of ``sampling.py`` on a host."""

    def __init__(
        self,
        backend: Backend,
        host: Host,
        model: Path,
        results: Path,
        *arguments: str,
        size: str = ODD,
        again: str = "",
        **env: str,
    ) -> None:
        self._results, self._output = results, results.with_suffix(".txt")
        program = ["-m", "tests.machines.sampling", str(model), str(results), *arguments, size, again]
        self._process = host.popen([PYTHON, *program], backend.environment(**env), output=self._output.open("w"))

    def said(self) -> list[dict[str, Any]]:
        """The lines that it has printed so far."""
        lines = [line for line in self._output.read_text().splitlines() if line.startswith("{")]
        return [json.loads(line) for line in lines]

    def reaches(self, step: int) -> None:
        """Wait until it has done a step."""
        wait_until(lambda: any(line.get("step", 0) >= step for line in self.said()), SECONDS, f"step {step} is done")

    def ends(self, times: int = 1) -> list[dict[str, Any]]:
        """Wait until it has sampled, and return what it says of each time."""

        def found() -> list[dict[str, Any]]:
            return [line for line in self.said() if "ranks" in line]

        wait_until(lambda: len(found()) >= times or self._process.poll(), SECONDS, f"it has sampled {times} times")
        assert len(found()) >= times, self._output.read_text()
        return found()

    def kill(self) -> None:
        """Kill it."""
        self._process.kill()

    def samples(self) -> torch.Tensor:
        """Wait for its end, and return its latents."""
        assert self._process.wait(SECONDS) == 0, self._output.read_text()
        return load_file(self._results)["samples"]


def close(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether latents are equal at 1e-4."""
    return bool((got - wanted).abs().max() <= 1e-4 * wanted.abs().max())
