"""The device memory that this rank's models take, and the order of eviction."""

import gc
import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Protocol

import torch

from ..checkpoint.checkpoint import HIGH_NOISE, LOW_NOISE
from ..distributed.device_memory import release_cache
from .room import Claim, Room, claim, room_on

log = logging.getLogger(__name__)

_TRANSFORMERS = (HIGH_NOISE, LOW_NOISE)


class LoadedModel(Protocol):
    """The loaded components of one checkpoint."""

    name: str

    @property
    def nbytes(self) -> int:
        """Bytes that they take."""

    @property
    def streams(self) -> bool:
        """Whether blocks stream from the machine's memory."""

    @property
    def cpu_bytes(self) -> int:
        """Bytes of the machine's memory from which blocks stream, if this rank has made it."""

    def has(self, name: str) -> bool:
        """Whether a component is loaded."""

    def drop(self, name: str) -> None:
        """Free a component."""

    def release_cpu(self) -> None:
        """Free the machine's memory from which blocks stream, with what is loaded from it."""

    def forget_idle(self) -> bool:
        """Free the factors of LoRAs that are not in use; return whether there were any."""


class DeviceMemory:
    """The memory of this rank's device.

    Args:
        models: returns all models of this rank, in the order of eviction.
        ranks: number of all ranks.
    """

    def __init__(self, device: torch.device, models: Callable[[], Iterable[LoadedModel]], ranks: int = 1) -> None:
        self.device, self._models, self.ranks = device, models, ranks

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

    def free_up(self, nbytes: int, wanted: LoadedModel, keep: Collection[str] = (), *, ranks: int = 1) -> None:
        """Free what no request uses until ``nbytes`` are free, or nothing is left to free.

        Args:
            nbytes: what is about to be used.
            wanted: the model that needs it.
            keep: its components that stay.
            ranks: number of ranks that are about to use as much.
        """
        sharers = self.sharers(ranks)
        if nbytes and self.room.lacks(nbytes, sharers):
            free(self.device)
            while self.room.lacks(nbytes, sharers) and self.free_next(wanted, keep):
                pass

    def free_next(self, wanted: LoadedModel, keep: Collection[str] = ()) -> bool:
        """Free what is next in the order; return false if nothing is left to free.

        What costs least to get back goes first: factors of LoRAs that no request uses, text encoders, VAEs,
        transformers of other models, other transformers of the same model.
        """
        freed = [model.name for model in self._all() if model.forget_idle()]
        if freed:
            log.warning("the device is full: freeing LoRAs of %s that are not in use", " and ".join(freed))
        else:
            victim = next(self._victims(wanted, keep), None)
            if victim is None:
                return False
            model, name = victim
            log.warning("the device is full: unloading the %s of %s to make room for %s", name, model.name, wanted.name)
            model.drop(name)
            del model, victim
        free(self.device)
        return True

    def idle_cpu_bytes(self, wanted: LoadedModel) -> int:
        """Return the bytes of the machine's memory from which blocks of other models stream, as far as made here."""
        return sum(model.cpu_bytes for model in self._all() if model is not wanted)

    def release_cpu(self, wanted: LoadedModel) -> None:
        """Free the machine's memory from which other models stream. All ranks do it, or the memory stays in use."""
        for model in self._all():
            if model is not wanted and model.streams:
                log.warning("the machine is short of memory: unloading %s to make room for %s", model.name, wanted.name)
                model.release_cpu()
        free(self.device)

    def _victims(self, wanted: LoadedModel, keep: Collection[str]) -> Iterator[tuple[LoadedModel, str]]:
        others = [model for model in self._all() if model is not wanted]
        order: tuple[tuple[tuple[str, ...], list[LoadedModel]], ...] = (
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

    def _all(self) -> list[LoadedModel]:
        """Return every model once; requests may know one by several names."""
        return list(dict.fromkeys(self._models()))


def free(device: torch.device) -> None:
    """Return the memory of unreferenced objects to the device."""
    gc.collect()
    release_cache(device)
