"""The loaded components of one checkpoint on this rank's device, whatever they are."""

from collections.abc import Callable, Collection
from typing import Any, TypeVar, cast

import torch

from ..interfaces.family import Family
from .cpu_store import CpuStore
from .device_memory import DeviceMemory
from .weight_changes import WeightChanges

T = TypeVar("T")


class Parts:
    """Loaded components by diffusers' name, each loaded on first use and then kept.

    Args:
        name: the checkpoint's name in messages.
        memory: of this rank's device, where other models make room.

    Attributes:
        loads: number of component loads so far.
        stores: the machine's memory from which blocks of a component stream, by the component's name.
    """

    def __init__(self, name: str, memory: DeviceMemory) -> None:
        self.name, self.memory = name, memory
        self.loads = 0
        self.stores: dict[str, CpuStore] = {}
        self._parts: dict[str, Any] = {}
        self._bytes: dict[str, int] = {}
        self._changes: dict[str, WeightChanges] = {}

    def has(self, name: str) -> bool:
        """Whether a component is loaded."""
        return name in self._parts

    def names(self) -> tuple[str, ...]:
        """Return the names of what is loaded. Safe to call from another thread."""
        return tuple(sorted(self._parts.copy()))

    @property
    def nbytes(self) -> int:
        """Bytes that the loaded components take on this rank, with their LoRAs."""
        weights = sum(self._bytes.get(name, 0) for name in self._parts)
        return weights + sum(changes.nbytes for changes in list(self._changes.values()))

    def drop(self, name: str) -> None:
        """Free a component; its next use loads it again."""
        self._parts.pop(name, None)
        self._changes.pop(name, None)  # it holds the component

    def drop_with_store(self, name: str) -> None:
        """Free a component, and the memory from which it streams."""
        self.drop(name)
        self.stores.pop(name, None)

    def release_cpu(self) -> None:
        """Free the machine's memory from which blocks stream, with what is loaded from it."""
        for name in list(self.stores):
            self.drop_with_store(name)

    @property
    def streams(self) -> bool:
        """Whether blocks stream from the machine's memory."""
        return bool(self.stores)

    @property
    def cpu_bytes(self) -> int:
        """Bytes of the machine's memory from which blocks stream, if this rank has made it."""
        return sum(store.data.numel() for store in self.stores.values() if store.made_here)

    def forget_idle(self) -> bool:
        """Free the factors of LoRAs that are not in use; return whether there were any."""
        forgotten = [changes.forget_idle() for changes in list(self._changes.values())]
        return any(forgotten)

    def get(self, name: str, load: Callable[[], T], nbytes: int | None = None) -> T:
        """Return a component; load it if necessary.

        Args:
            nbytes: what it takes on the device; None for what its tensors say.
        """
        if name not in self._parts:
            from . import partial

            part: Any = self.with_room(load)
            module = part.module if isinstance(part, Family) else part
            self._bytes[name] = partial.local_bytes(module) if nbytes is None else nbytes
            self._parts[name] = part
            self.loads += 1
        return cast(T, self._parts[name])

    def changed_by(self, name: str, change: Callable[[WeightChanges], None]) -> None:
        """Change the weights of a loaded component."""
        changes = self._changes[name]
        self.with_room(lambda: change(changes), keep=(name,))

    def track(self, name: str, changes: WeightChanges) -> None:
        """Keep what changes a component's weights for as long as it is loaded."""
        self._changes[name] = changes

    def with_room(self, work: Callable[[], T], keep: Collection[str] = ()) -> T:
        """Return the result of ``work``. Whenever the device is full, free what is next in the order, and retry."""
        while True:
            try:
                return work()
            except torch.OutOfMemoryError:
                if not self.memory.free_next(self, keep):
                    raise
