"""Whether a call is forecast, by how much what the first block computes has changed: one decision for all ranks."""

import math
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any

from torch import Tensor

from ..distributed.collectives import gather_numbers
from ..distributed.mesh import Axis
from ..interfaces.family import Family
from ..interfaces.geometry import IMAGE
from ..interfaces.state import State
from ..step_cache.settings import StepCache
from .plan import DenoisingPlan

Row = tuple[int, int]
"""A branch and a sample of it."""


class ChangeGate:
    """Measures one sampling's first blocks, and decides.

    What is measured is the first block's residual, as in First Block Cache, or its modulated input, whose changes are
    added up until a call is computed, as in TeaCache (https://arxiv.org/abs/2411.19108): what is added is the value of
    the family's published polynomial, where there is one.

    Each rank sums its tokens' changes by row, and gathers the sums of all ranks. All of them add these up in the same
    order, and so decide by the same bits. The row that changes most decides for all.

    Args:
        whole: all ranks of the layout.
        plan: the sampling's.
    """

    def __init__(self, cache: StepCache, whole: Axis, plan: DenoisingPlan) -> None:
        self._cache, self._whole, self._shape = cache, whole, (plan.branches, max(plan.samples))
        self._adds_up = cache.method == "change"
        self._polynomial = plan.teacache if self._adds_up else ()
        self._before: dict[int, Tensor] = {}
        self._seen: dict[int, Tensor] = {}
        self._accumulated = 0.0
        self._clear()

    @contextmanager
    def measuring(self, family: Family, state: State, rows: Sequence[Row]) -> Iterator[None]:
        """Measure the batch whose first block runs inside the ``with`` block.

        Args:
            state: before the block.
            rows: of the batch, in its order.
        """
        self._rows, self._input = rows, state.streams[IMAGE]
        hook: Any = None
        if self._adds_up:
            module = family.attentions[0].module
            hook = module.register_forward_pre_hook(self._take_input, with_kwargs=True)
        try:
            yield
        finally:
            if hook is not None:
                hook.remove()

    def measured(self, state: State) -> State:
        """Take what the block has computed, and return it."""
        value = self._input if self._adds_up else state.streams[IMAGE] - self._input
        value = value.reshape(len(self._rows), -1)
        batch = self._rows[0][0]
        self._seen[batch], before = value, self._before.get(batch)
        if before is not None:
            changes = (value - before).abs().double().sum(1).tolist()
            sizes = before.abs().double().sum(1).tolist()
            for (branch, sample), change, size in zip(self._rows, changes, sizes, strict=True):
                self._sums[2 * (branch * self._shape[1] + sample)] = change
                self._sums[2 * (branch * self._shape[1] + sample) + 1] = size
        return state

    def skips(self, *, may: bool) -> bool:
        """Whether the call is forecast. Collective over all ranks if it may be."""
        skipped = may and self._little()
        if not skipped:
            self._accumulated = 0.0
        if not skipped or self._adds_up:
            self._before = self._seen
        self._clear()
        return skipped

    def _little(self) -> bool:
        change = self._change()
        if self._polynomial:
            value = reduce(lambda value, coefficient: value * change + coefficient, self._polynomial, 0.0)
            change = value if value >= 0 else math.inf  # a change so large that the polynomial was not fitted to it
        self._accumulated = change + (self._accumulated if self._adds_up else 0.0)
        return self._accumulated < self._cache.threshold

    def _change(self) -> float:
        """The relative change of the row that changes most."""
        bits = struct.unpack(f"{len(self._sums)}q", struct.pack(f"{len(self._sums)}d", *self._sums))
        sums = [0.0] * len(bits)
        for numbers in gather_numbers(bits, self._whole):
            values = struct.unpack(f"{len(bits)}d", struct.pack(f"{len(bits)}q", *numbers))
            sums = [total + value for total, value in zip(sums, values, strict=True)]
        return max((change / size for change, size in zip(sums[::2], sums[1::2], strict=True) if size), default=0.0)

    def _take_input(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._input = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]

    def _clear(self) -> None:
        self._seen, self._sums = {}, [0.0] * (2 * self._shape[0] * self._shape[1])
