"""A checkpoint's components, each loaded when it is first needed and then kept."""

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch

from ..checkpoint.checkpoint import HIGH, LOW, Checkpoint
from ..distributed.collectives import agree, all_of
from ..distributed.mesh import DeviceMesh
from ..interfaces.family import Family
from ..protocol.messages import LoadedModel
from ..protocol.tensors import NAMES
from .load import check_component, load_text_encoder, load_transformer, load_vae

log = logging.getLogger(__name__)

T = TypeVar("T")

_NOWHERE = -1
"""The number of no mesh."""


@dataclass(frozen=True, kw_only=True)
class WeightPart:
    """Which part of the weights a rank holds: a stage of ``pipe``, cut by speeds; of that one of ``tensor`` parts; of
    that a shard, if ``sharers`` share it."""

    pipe: tuple[int, tuple[float, ...]]
    tensor: tuple[int, int]
    sharers: tuple[int, ...]

    @property
    def alone(self) -> bool:
        """Whether no group is needed to load these weights or to compute with them."""
        return self.tensor[0] == 1 and not self.sharers

    @classmethod
    def on(cls, mesh: DeviceMesh) -> "WeightPart":
        """What a rank of the mesh holds."""
        tensor, sharers = mesh.axes["tensor"], mesh.sequence.ranks if mesh.layout.shard_weights else ()
        pipe = (mesh.axes["pipe"].index, mesh.speeds("pipe") if mesh.layout.pipe > 1 else ())
        return cls(pipe=pipe, tensor=(tensor.size, tensor.index), sharers=sharers)


class ComponentCache:
    """One checkpoint in one dtype on this rank's device. ``loads`` counts the weight loads ever done.

    ``make_room`` is called when the device is full while weights load; false means that nothing can be freed.
    ``whole_vae`` says why the VAE works on one rank, once it is found that it cannot be split.
    """

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, make_room: Callable[[], bool]
    ) -> None:
        self.checkpoint, self.dtype, self.device, self._make_room = checkpoint, dtype, device, make_room
        self.loads = 0
        self.whole_vae = ""
        self._held: dict[str, WeightPart] = {}
        self._meshes: dict[str, DeviceMesh] = {}
        self._parts: dict[str, Any] = {}

    def has(self, name: str) -> bool:
        """Whether a component's weights are here."""
        return name in self._parts

    def check(self, name: str) -> None:
        """Refuse a component that cannot be loaded, without loading it.

        Raises:
            InvalidRequest: it is missing, of an unsupported class, quantised, or not in safetensors.
        """
        if name not in self._parts:
            check_component(self.checkpoint, name)

    def transformer(self, mesh: DeviceMesh, name: str) -> Family:
        """What this rank holds of a transformer, by its component's name, on a mesh.

        Meshes that cut the weights alike share them; for any other the weights are loaded anew.
        """
        held = WeightPart.on(mesh)
        if self._held.get(name) != held:
            self._parts.pop(name, None)
        if name not in self._parts:
            self._meshes.pop(name, None)
            if not held.alone:
                self._meshes[name] = mesh
        self._held[name] = held
        return self._part(name, lambda: load_transformer(self.checkpoint, self.dtype, self.device, mesh, name))

    def agree(self, mesh: DeviceMesh) -> None:
        """Forget transformers whose parts are not on the groups of one mesh on all ranks that hold them.

        It is so where another rank has lost its own, for want of memory, say, or loaded other weights meanwhile, which
        a layout without this rank had it do. Collective over those ranks: they load together again.
        """
        held, tensor, sequence = WeightPart.on(mesh), mesh.axes["tensor"], mesh.sequence
        if held.alone:
            return
        for name in (HIGH, LOW):
            here = name in self._parts and self._held[name] == held
            number = self._meshes[name].number if here else _NOWHERE
            first = agree(agree(number, tensor), sequence)
            if not all_of(all_of(number == first != _NOWHERE, tensor), sequence):
                self._parts.pop(name, None)

    def meshes(self) -> list[DeviceMesh]:
        """Those whose groups the loaded transformers use."""
        return [mesh for name, mesh in self._meshes.items() if name in self._parts]

    def text_encoder(self) -> Any:
        """The text encoder, a transformers module."""
        return self._part("text_encoder", lambda: load_text_encoder(self.checkpoint, self.dtype, self.device))

    def vae(self) -> Any:
        """The VAE, a diffusers module."""
        return self._part("vae", lambda: load_vae(self.checkpoint, self.device))

    def describe(self) -> LoadedModel:
        """What is loaded now; safe to call from another thread."""
        return LoadedModel(
            path=str(self.checkpoint.path),
            dtype=NAMES[self.dtype],
            parts=tuple(sorted(self._parts.copy())),
            loads=self.loads,
            note=f"the VAE works on one rank: {self.whole_vae}" if self.whole_vae else "",
        )

    def _part(self, name: str, load: Callable[[], T]) -> T:
        while name not in self._parts:
            try:
                self._parts[name] = load()
                self.loads += 1
            except torch.OutOfMemoryError:
                if not (self._make_room() or (name in (HIGH, LOW) and self._drop_expert())):
                    raise
        return cast(T, self._parts[name])

    def _drop_expert(self) -> bool:
        """Forget the transformer that is not in use while the other one loads; whether there was one."""
        dropped = [name for name in (HIGH, LOW) if self._parts.pop(name, None) is not None]
        if dropped:
            log.warning("the device is full: %s of %s is unloaded", dropped[0], self.checkpoint.path)
            free(self.device)
        return bool(dropped)


def free(device: torch.device) -> None:
    """Give back the memory of what nobody refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
