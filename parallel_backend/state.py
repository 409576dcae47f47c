"""``State``: where families and strategies meet."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class State:
    """What flows through the blocks.

    Attributes:
        tokens: ``[B, S, D]``.
        per_token: tensors whose dim 1 is indexed by token; they are sharded along with ``tokens``.
        context: what is small and global (text, timestep); whole on every rank.
    """

    tokens: Tensor
    per_token: Mapping[str, Tensor]
    context: Mapping[str, Tensor]
