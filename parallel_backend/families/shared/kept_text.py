"""Keeps what layers for the text alone have computed, so that the steps of a run do not compute it again."""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

from torch import Tensor

_Reference = ref[Tensor] | None

_MOST = 4
"""Results that are kept: the prompts of one run."""


class KeptText:
    """Results by the tensors that they come from, and by what changes the weights.

    The ranks keep a prompt's tensors for all steps, so a tensor is known by its identity: comparing values would make
    the host wait for a GPU. No result outlives its tensors.
    """

    def __init__(self) -> None:
        self._kept: list[tuple[tuple[_Reference, ...], Any, Tensor]] = []

    def get(self, given: Sequence[Tensor | None], changes: Any, compute: Callable[[], Tensor]) -> Tensor:
        """Return what ``compute`` returns, or has returned for these tensors.

        Args:
            given: the tensors that it reads besides the weights.
            changes: what changes the weights. Results for other changes are dropped.
        """
        self._kept = [entry for entry in self._kept if entry[1] == changes and _alive(entry[0])]
        for references, _, result in self._kept:
            if [_tensor(each) is tensor for each, tensor in zip(references, given, strict=True)] == [True] * len(given):
                return result
        result = compute()
        references = tuple(None if tensor is None else ref(tensor) for tensor in given)
        self._kept = [*self._kept, (references, changes, result)][-_MOST:]
        return result


def _tensor(reference: _Reference) -> Tensor | None:
    return None if reference is None else reference()


def _alive(references: Sequence[_Reference]) -> bool:
    return all(reference is None or reference() is not None for reference in references)
