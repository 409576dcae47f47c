"""Checks of the values in a request's tensors, on rank 0, which has them."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


def first_not_finite(tensors: Mapping[str, Tensor]) -> int:
    """Index of the first tensor that holds NaN or infinity; -1 if none does."""
    for index, tensor in enumerate(tensors.values()):
        if tensor.is_floating_point() and tensor.numel() and not torch.stack(torch.aminmax(tensor)).isfinite().all():
            return index
    return -1


@dataclass(frozen=True, kw_only=True)
class Tables:
    """What a family's inputs of integers are indices into.

    Attributes:
        rows: numbers of rows of the model's own tables, see ``Family.embedding_sizes``.
        levels: the inputs that are tables of others, see ``Family.levels``.
    """

    rows: Mapping[str, int]
    levels: Mapping[str, str]

    def sizes(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
        """Return the size of the table of each tensor that is one of indices, by the names in a request."""
        found = {name: self.rows[_input(name)] for name in shapes if _input(name) in self.rows}
        others = {name: self._levels(name) for name in shapes if _input(name) in self.levels}
        return found | {name: shapes[levels][1] for name, levels in others.items() if len(shapes.get(levels, ())) > 1}

    def refusal(self, name: str, value: int, sizes: Mapping[str, int]) -> str:
        """Return the sentence about an index that is outside."""
        owner = self._levels(name) if _input(name) in self.levels else "this model"
        return f"{name} holds {value}, and {owner} knows 0 to {sizes[name] - 1}"

    def _levels(self, name: str) -> str:
        return f"{name.removesuffix(_input(name))}{self.levels[_input(name)]}"


def _input(name: str) -> str:
    """Return the name of a family's input without its branch."""
    return name.rpartition(".")[2]


def first_outside(tensors: Mapping[str, Tensor], sizes: Mapping[str, int]) -> tuple[int, int]:
    """Return the index of the first tensor with a number outside its table, and the number; -1 and 0 if all are inside.

    Args:
        sizes: of the tables, see ``Tables.sizes``.
    """
    for index, (name, tensor) in enumerate(tensors.items()):
        most = sizes.get(name)
        bad = [] if most is None else tensor[(tensor < 0) | (tensor >= most)].tolist()
        if bad:
            return index, bad[0]
    return -1, 0
