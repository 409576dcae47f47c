"""The loaded components of each checkpoint, what they take of this rank's device, and the order of eviction."""

import gc
import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache
from typing import Any, TypeVar, cast

import torch

from ..checkpoint.checkpoint import HIGH_NOISE, LOW_NOISE
from ..distributed.device_memory import release_cache
from ..interfaces.family import Family
from .compiled_blocks import CompiledBlocks
from .cpu_store import CpuStore
from .held_weights import HeldWeights
from .room import Claim, Room, claim, room_on
from .weight_changes import WeightChanges

log = logging.getLogger(__name__)

T = TypeVar("T")

_TRANSFORMERS = (HIGH_NOISE, LOW_NOISE)


class Parts:
    """Loaded components by diffusers' name, each loaded on first use and then kept.

    Args:
        name: the checkpoint's name in messages.
        memory: of this rank's device, where other models make room.

    Attributes:
        loads: number of component loads so far.
        stores: the machine's memory from which blocks of a component stream, by the component's name.
        compiled: the compiled blocks of a component, by its name.
        held: weights of a transformer that are held beyond the part that is loaded, or for one, by its name.
    """

    def __init__(self, name: str, memory: "DeviceMemory") -> None:
        self.name, self.memory = name, memory
        self.loads = 0
        self.stores: dict[str, CpuStore] = {}
        self.compiled: dict[str, CompiledBlocks] = {}
        self.held: dict[str, HeldWeights] = {}
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
        """Bytes that the loaded components take on this rank, with their LoRAs and what is held beyond them."""
        weights = sum(self._bytes.get(name, 0) for name in self._parts)
        held = sum(each.spare for each in list(self.held.values()))
        return weights + held + sum(changes.nbytes for changes in list(self._changes.values()))

    def drop(self, name: str) -> None:
        """Free a component; its next use loads it again."""
        if name in self._parts:
            self.memory.forget_runs()
        self._parts.pop(name, None)
        self._changes.pop(name, None)  # it holds the component
        self.held.pop(name, None)
        if blocks := self.compiled.pop(name, None):
            blocks.use(False)  # what is compiled refers to itself

    def drop_for_part(self, name: str) -> None:
        """Free a transformer but for its weights, which its next part may use."""
        held = self._changes[name].held(self.held.get(name))
        self.drop(name)
        free(self.memory.device)  # the transformer refers to itself, and would keep weights that its next part frees
        self.held[name] = held

    def free_spare(self) -> bool:
        """Free weights that are held beyond the parts that are loaded; return whether there were any."""
        loaded = [(held, self._parts[name]) for name, held in self.held.items() if name in self._parts]
        freed = [held.free_spare(part.module) for held, part in loaded]
        return any(freed)

    def forget_held(self) -> bool:
        """Free weights that are held for a part that is not loaded yet; return whether there were any."""
        waiting = [held for name, held in self.held.items() if name not in self._parts and held.spare]
        for held in waiting:
            held.clear()
        return bool(waiting)

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

            _freeze_imports()
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


class DeviceMemory:
    """The memory of this rank's device.

    Args:
        models: returns all models of this rank, in the order of eviction.
        ranks: number of all ranks.

    Attributes:
        forget_runs: frees what requests that repeat go on with, since it refers to components.
        forget_tensors: does the same, and frees tensors of earlier requests; returns whether there were any.
    """

    def __init__(self, device: torch.device, models: Callable[[], Iterable[Parts]], ranks: int = 1) -> None:
        self.device, self._models, self.ranks = device, models, ranks
        self.forget_runs: Callable[[], object] = bool
        self.forget_tensors: Callable[[], bool] = bool

    @property
    def room(self) -> Room:
        """The room that there is now."""
        held = sum(model.nbytes for model in self._all()) if self.device.type == "cpu" else 0
        return room_on(self.device, held)

    def claim(self, needed: int) -> Claim:
        """Return this rank's claim to ``needed`` bytes."""
        return claim(self.device, self.room, needed)

    def sharers(self, ranks: int) -> int:
        """Return how many of these ranks take from the same memory: CPU ranks all do."""
        return ranks if self.device.type == "cpu" else 1

    def lacks(self, nbytes: int, ranks: int) -> bool:
        """Whether the device has no room for ``nbytes`` on each of so many ranks."""
        return self.room.lacks(nbytes, self.sharers(ranks))

    def free_up(self, nbytes: int, wanted: Parts, keep: Collection[str] = (), *, ranks: int = 1) -> None:
        """Free what no request uses until ``nbytes`` are free, or nothing is left to free.

        Args:
            nbytes: what is about to be used.
            wanted: the model that needs it.
            keep: its components that stay.
            ranks: number of ranks that are about to use as much.
        """
        if nbytes and self.lacks(nbytes, ranks):
            free(self.device)
            while self.lacks(nbytes, ranks) and self.free_next(wanted, keep):
                pass

    def free_next(self, wanted: Parts, keep: Collection[str] = ()) -> bool:
        """Free what is next in the order; return false if nothing is left to free.

        What costs least to get back goes first: tensors of earlier requests, weights that only other layouts need,
        factors of LoRAs that no request uses, text encoders, VAEs, transformers of other models, other transformers of
        the same model, weights for a part that is about to be loaded.
        """
        if self.forget_tensors():
            log.warning("the device is full: freeing tensors of earlier requests")
            free(self.device)
            return True
        if any(model.free_spare() or (model is not wanted and model.forget_held()) for model in self._all()):
            free(self.device)
            log.warning("the device is full: freeing weights that only other layouts need")
            return True
        freed = [model.name for model in self._all() if model.forget_idle()]
        if freed:
            log.warning("the device is full: freeing LoRAs of %s that are not in use", " and ".join(freed))
        else:
            victim = next(self._victims(wanted, keep), None)
            if victim is None:
                return wanted.forget_held()
            model, name = victim
            log.warning("the device is full: unloading the %s of %s to make room for %s", name, model.name, wanted.name)
            model.drop(name)
            del model, victim
        free(self.device)
        return True

    def free_unused_weights(self) -> None:
        """Free weights that only other layouts need, or a part that is not loaded."""
        freed = [each for model in self._all() for each in (model.free_spare(), model.forget_held())]
        if any(freed):
            free(self.device)

    def idle_cpu_bytes(self, wanted: Parts) -> int:
        """Return the bytes of the machine's memory from which blocks of other models stream, as far as made here."""
        return sum(model.cpu_bytes for model in self._all() if model is not wanted)

    def release_cpu(self, wanted: Parts) -> None:
        """Free the machine's memory from which other models stream. All ranks do it, or the memory stays in use."""
        for model in self._all():
            if model is not wanted and model.streams:
                log.warning("the machine is short of memory: unloading %s to make room for %s", model.name, wanted.name)
                model.release_cpu()
        free(self.device)

    def _victims(self, wanted: Parts, keep: Collection[str]) -> Iterator[tuple[Parts, str]]:
        others = [model for model in self._all() if model is not wanted]
        order: tuple[tuple[tuple[str, ...], list[Parts]], ...] = (
            (("text_encoder",), [*others, wanted]),
            (("vae",), [*others, wanted]),
            (_TRANSFORMERS, others),
            (_TRANSFORMERS, [wanted]),
        )
        for names, models in order:
            for model in models:
                for name in names:
                    if model.has(name) and not (model is wanted and name in keep):
                        yield model, name

    def _all(self) -> list[Parts]:
        """Return every model once; requests may know one by several names."""
        return list(dict.fromkeys(self._models()))


@cache
def _freeze_imports() -> None:
    """Let ``free`` pass over what has been imported, which is never garbage: looking at it takes most of its time.

    Once in a process, before anything is loaded: what is frozen is freed only if it is in no cycle.
    """
    gc.collect()
    gc.freeze()


def free(device: torch.device) -> None:
    """Return the memory of unreferenced objects to the device."""
    gc.collect()
    release_cache(device)
