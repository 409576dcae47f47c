"""Fallbacks after out of memory. Each needs less memory than the one before."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from ..errors import NoRoom, OutOfMemory
from ..layout.choice import less_memory
from ..layout.parallel_layout import ParallelLayout
from ..protocol.messages import Forward, RankRequest, Sample
from ..protocol.model_spec import ModelSpec

FreeMemory = Callable[[], bool]
"""Unloads this process's own models from the GPUs that the ranks use, too. Returns whether there were any."""


class SettledLayouts(dict[ModelSpec, ParallelLayout]):
    """Layouts that fit, by the spec of a model that does not."""

    def of(self, spec: ModelSpec) -> ModelSpec:
        """Return a model's spec with the layout that fitted before."""
        layout = self.get(spec)
        return replace(spec, layout=layout) if layout else spec

    def forget(self, spec: ModelSpec) -> None:
        """Begin with the wanted layout again, for every layout of the model."""
        for each in list(self):
            if (each.path, each.stamp, each.dtype) == (spec.path, spec.stamp, spec.dtype):
                del self[each]


class MemoryLadder:
    """What one request tries where a rank runs out of memory.

    Args:
        message: the request.
        layouts: layouts to begin with. The layout that fits this request is added.
        free_memory: None if the ranks share no GPU with this process.
    """

    def __init__(self, message: RankRequest, layouts: SettledLayouts, free_memory: FreeMemory | None) -> None:
        self._wanted, self._layouts, self._free_memory = message.model, layouts, free_memory
        self._message = replace(message, model=layouts.of(message.model))
        self._first: OutOfMemory | None = None
        self._steps: Iterator[tuple[str, ParallelLayout | None]] = iter(())
        self._tried: list[ParallelLayout] = []
        self._adapt = {"adapt": message.adapt} if isinstance(message, Forward | Sample) else {}

    def first_try(self) -> RankRequest:
        """Return the request for the first attempt. On shared GPUs, other models leave before ours take less room."""
        changes: dict[str, Any] = {"adapt": False} if self._free_memory and self._adapt else {}
        return replace(self._message, **changes)

    def take(self, error: OutOfMemory) -> tuple[str, dict[str, Any]]:
        """Return the next fallback: a sentence for the user, and the fields of the request that change.

        Raises:
            OutOfMemory: no fallback is left. It is the first error, with its numbers, and names the tried layouts.
        """
        if self._first is None:
            self._first, self._steps = error, self._fallbacks(error)
        action, layout = next(self._steps, ("", None))
        if not action:
            tried = " and ".join(map(str, self._tried))
            raise type(self._first)(
                f"{self._first}; the layouts {tried} have no room for it, either" if tried else str(self._first)
            )
        options: dict[str, Any] = dict(self._adapt)
        if layout:
            self._tried.append(layout)
            options["model"] = replace(self._message.model, layout=layout)
        return action, options

    def settle(self) -> None:
        """Record that the request fitted."""
        if self._tried:
            self._layouts[self._wanted] = self._tried[-1]

    def _fallbacks(self, first: OutOfMemory) -> Iterator[tuple[str, ParallelLayout | None]]:
        model = self._message.model
        if self._free_memory and self._free_memory():
            yield "trying again without ComfyUI's own models on these GPUs", None
        elif self._free_memory and self._adapt and isinstance(first, NoRoom):
            yield "fitting the weights into less memory", None
        for layout in less_memory(model.layout, len(model.devices.indices)) if self._adapt else ():
            yield f"trying again with layout {layout}", layout
