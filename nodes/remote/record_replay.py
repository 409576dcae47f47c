"""Have all branches of a step reach the backend in one request, however ComfyUI batches them.

ComfyUI alone decides by its own device's memory and by equal shapes whether cond and uncond share a call.
So its ``calc_cond_batch`` is run twice: once against a ``Recording``, which answers zeros and remembers what
was asked, and once against a ``Replay``, which asks the backend for all of it together at the first question.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Branch:
    """One denoiser call: ``index`` is 0 for cond, 1 for uncond, as ComfyUI counts.

    ``inputs`` holds the family's arguments by name, batch first; ``latent`` names the one that the answer is shaped as.
    """

    index: int
    inputs: Mapping[str, Tensor]
    latent: str

    def same_as(self, other: "Branch") -> bool:
        """Whether both ask the same question."""
        return self.inputs.keys() == other.inputs.keys() and all(
            tensor.shape == other.inputs[name].shape and bool(torch.equal(tensor, other.inputs[name]))
            for name, tensor in self.inputs.items()
        )


Run = Callable[[list[Branch]], list[Tensor]]


class Recording:
    """Answers zeros and remembers the branches."""

    def __init__(self) -> None:
        self.branches: list[Branch] = []

    def answer(self, branches: list[Branch], run: Run) -> list[Tensor]:
        """Zeros of the right shapes; nothing is run."""
        self.branches += branches
        return [torch.zeros_like(branch.inputs[branch.latent]) for branch in branches]


class Replay:
    """Answers what was recorded from one run of all of it; what was not recorded is run by itself.

    The run waits for the first question, so a step that a cache skips costs nothing.
    """

    def __init__(self, recorded: list[Branch]) -> None:
        self._recorded = recorded
        self._results: list[Tensor] | None = None

    def answer(self, branches: list[Branch], run: Run) -> list[Tensor]:
        """The predictions of ``branches``."""
        found = [self._find(branch) for branch in branches]
        known = [index for index in found if index is not None]
        if len(known) < len(branches):
            return run(branches)
        if self._results is None:
            self._results = run(self._recorded)
        return [self._results[index] for index in known]

    def _find(self, branch: Branch) -> int | None:
        return next((i for i, recorded in enumerate(self._recorded) if recorded.same_as(branch)), None)
