"""A checkpoint's components, each loaded on first use and then kept."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast
from weakref import WeakKeyDictionary

import torch

from ..checkpoint.checkpoint import HIGH_NOISE, LOW_NOISE, Checkpoint
from ..distributed.collectives import agree, all_true
from ..distributed.mesh import Axis, DeviceMesh
from ..interfaces.family import Family
from ..layout.parallel_layout import ParallelLayout
from ..protocol.model_spec import Adapter, Overlay
from ..protocol.status import LoadedModel
from ..protocol.tensors import NAMES
from .device_memory import DeviceMemory
from .load import (
    PlannedTransformer,
    check_component,
    load_text_encoder,
    load_vae,
    plan_transformer,
    text_encoder_bytes,
    vae_bytes,
)
from .room import check_fits, check_work, claims_of_all
from .weight_changes import WeightChanges
from .weight_source import WeightSource

T = TypeVar("T")

_SHARE = (
    "let the ranks share the weights with tensor, pipe or shard_weights of Parallel Layout, on more devices if need be"
)
_ANOTHER_LOADER = "load the text encoder with ComfyUI's own loader"
_SMALLER = "make a smaller or shorter latent"
_SPLIT = "split the work over more devices with ulysses, ring or cfg of Parallel Layout"
_TILES = "set a tile in Parallel VAE Decode or Encode"
_MORE_DEVICES = "use more devices"
"""What would work when a device has no room."""

_SLACK = 4
"""Workspaces of kernels and fragments get this part of what the tensors take; only to make room, not to refuse."""

_NO_MESH = -1
"""Stands for no mesh where a mesh's serial number is expected."""


@dataclass(frozen=True, kw_only=True)
class WeightPart:
    """Which part of the weights a rank holds.

    Attributes:
        pipe: index of the stage, and the stages' speeds, by which the blocks are cut.
        tensor: degree of ``tensor``, and this rank's index on it: its part of the stage.
        sharers: the ranks that shard that part among them; empty without sharding.
    """

    pipe: tuple[int, tuple[float, ...]]
    tensor: tuple[int, int]
    sharers: tuple[int, ...]

    @property
    def alone(self) -> bool:
        """Whether neither loading these weights nor computing with them needs a process group."""
        return self.tensor[0] == 1 and not self.sharers

    @classmethod
    def on(cls, mesh: DeviceMesh) -> "WeightPart":
        """Return the part that this rank of the mesh holds."""
        tensor, sharers = mesh.axes["tensor"], mesh.sequence.ranks if mesh.layout.shard_weights else ()
        pipe = (mesh.axes["pipe"].index, mesh.speeds("pipe") if mesh.layout.pipe > 1 else ())
        return cls(pipe=pipe, tensor=(tensor.size, tensor.index), sharers=sharers)


class ComponentCache:
    """The loaded components of one checkpoint, in one dtype, on this rank's device.

    Args:
        checkpoint: the model folder.
        dtype: dtype of the transformers and the text encoder.
        memory: of this rank's device, where other models make room.

    Attributes:
        name: the checkpoint's name in messages.
        device: this rank's device.
        loads: number of component loads so far.
        whole_vae: why the VAE cannot be split and runs on one rank; "" unless that is known.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, memory: DeviceMemory) -> None:
        self.checkpoint, self.dtype, self.memory = checkpoint, dtype, memory
        self.name, self.device = checkpoint.name, memory.device
        self.loads = 0
        self.whole_vae = ""
        self._work = 0
        self._layout: ParallelLayout | None = None
        self._held: dict[str, WeightPart] = {}
        self._meshes: dict[str, DeviceMesh] = {}
        self._parts: dict[str, Any] = {}
        self._bytes: dict[str, int] = {}
        self._changes: WeakKeyDictionary[Any, WeightChanges] = WeakKeyDictionary()

    def has(self, name: str) -> bool:
        """Whether a component is loaded."""
        return name in self._parts

    @property
    def nbytes(self) -> int:
        """Bytes that the loaded components take on this rank, with their LoRAs."""
        weights = sum(self._bytes.get(name, 0) for name in self._parts)
        return weights + sum(changes.nbytes for changes in list(self._changes.values()))

    def drop(self, name: str) -> None:
        """Free a component; its next use loads it again."""
        self._parts.pop(name, None)

    def forget_idle(self) -> bool:
        """Free the factors of LoRAs that are not in use; return whether there were any."""
        forgotten = [changes.forget_idle() for changes in list(self._changes.values())]
        return any(forgotten)

    def check(self, name: str) -> None:
        """Refuse a component that cannot be loaded, without loading it.

        Raises:
            InvalidRequest: it is missing, of an unsupported class, or stored in a way that cannot be read.
        """
        if name not in self._parts:
            check_component(self.checkpoint, name)

    def missing(self, mesh: DeviceMesh) -> list[str]:
        """Return the transformers of which this rank does not hold its part on the mesh."""
        held = WeightPart.on(mesh)
        names = [name for name in (HIGH_NOISE, LOW_NOISE) if name in self.checkpoint.components]
        return [name for name in names if not self._holds(name, held)]

    def plan(self, mesh: DeviceMesh, name: str) -> PlannedTransformer:
        """Plan this rank's part, on a mesh, of the transformer component ``name``. Reads no weights."""
        return plan_transformer(self.checkpoint, self.dtype, self.device, mesh, name)

    def check_room(self, mesh: DeviceMesh, needed: int, work: int) -> None:
        """Make room for a request, or refuse it on all ranks alike. Collective over the mesh.

        Args:
            mesh: the ranks that load.
            needed: bytes of weights that this rank loads; 0 if it holds everything.
            work: bytes that this rank's tensors take at least.

        Raises:
            InvalidRequest: weights do not fit, even if the ranks free all that they hold. Names numbers and remedies.
            NoRoom: weights and tensors together do not fit. Names numbers and remedies.
        """
        held = max((self._bytes[name] for name in (HIGH_NOISE, LOW_NOISE) if name in self._parts), default=0)
        weights = self.memory.claim(needed)
        loads, works = claims_of_all(mesh.whole, weights, replace(weights, needed=max(needed, held) + work))
        check_fits(loads, self.name, dtype=self.dtype, remedy=_SHARE)
        check_work(works, self.name, [_SMALLER, *([_SHARE] if mesh.whole.size == 1 else [_SPLIT])])
        self._work = work + work // _SLACK
        if not needed:
            self.memory.free_up(self._work, self, keep=(HIGH_NOISE,), ranks=mesh.whole.size)

    def transformer(
        self,
        mesh: DeviceMesh,
        name: str,
        plans: dict[str, PlannedTransformer],
        adapters: Sequence[Adapter],
        overlay: Overlay | None,
    ) -> Family:
        """Return this rank's part, on a mesh, of the transformer component ``name``; load it if necessary.

        Meshes on which the rank holds the same part share the loaded weights.

        Args:
            mesh: the mesh.
            name: the component.
            plans: parts that have been planned for the mesh, by name. The one that is loaded is taken out.
            adapters: the LoRAs that it applies from now on.
            overlay: the changed weights that it has from now on.
        """
        held = WeightPart.on(mesh)
        if not self._holds(name, held):
            self._parts.pop(name, None)
        if name not in self._parts:
            self._meshes.pop(name, None)
            if not held.alone:
                self._meshes[name] = mesh
        self._held[name] = held
        self._layout = mesh.layout
        family = self._part(name, lambda: self._load_planned(mesh, name, plans))
        self._use(name, adapters, overlay)
        return family

    def _use(self, name: str, adapters: Sequence[Adapter], overlay: Overlay | None) -> None:
        """Apply LoRAs and an overlay to a loaded component."""
        changes = self._changes[self._parts[name]]
        self._with_room(lambda: changes.use(adapters, overlay), keep=(name,))

    def _load_planned(self, mesh: DeviceMesh, name: str, plans: dict[str, PlannedTransformer]) -> Family:
        plan = plans.pop(name) if name in plans else self.plan(mesh, name)
        self.memory.free_up(plan.nbytes + self._work, self, ranks=mesh.whole.size)
        family = plan.fill()
        self._changes[family] = WeightChanges(family.module, name, plan.class_name, plan.source, plan.slices)
        return family

    def agree(self, mesh: DeviceMesh) -> None:
        """Drop transformers that the ranks of the mesh do not all hold on the groups of one mesh.

        Another rank may have dropped its part, for example because it ran out of memory, or may have loaded other
        weights since, for a layout that leaves this rank idle. Collective over the ranks that share the weights; they
        then load together.
        """
        held, tensor, sequence = WeightPart.on(mesh), mesh.axes["tensor"], mesh.sequence
        if held.alone:
            return
        for name in (HIGH_NOISE, LOW_NOISE):
            serial = self._meshes[name].serial if self._holds(name, held) else _NO_MESH
            first = agree(agree(serial, tensor), sequence)
            if not all_true(all_true(serial == first != _NO_MESH, tensor), sequence):
                self._parts.pop(name, None)

    def meshes(self) -> list[DeviceMesh]:
        """Return the meshes whose groups the loaded transformers use."""
        return [mesh for name, mesh in self._meshes.items() if name in self._parts]

    def text_encoder(self, adapters: Sequence[Adapter], overlay: Overlay | None) -> Any:
        """Return the text encoder with these changes, a module of transformers. Rank 0 alone loads it.

        Raises:
            InvalidRequest: it does not fit on the device. Names numbers and remedies.
        """
        encoder = self._part("text_encoder", self._load_text_encoder)
        self._use("text_encoder", adapters, overlay)
        return encoder

    def _load_text_encoder(self) -> Any:
        needed = text_encoder_bytes(self.checkpoint, self.dtype)
        weights = f"{self.name}'s text encoder"
        check_fits([self.memory.claim(needed)], weights, dtype=self.dtype, remedy=_ANOTHER_LOADER)
        self.memory.free_up(needed, self)
        encoder = load_text_encoder(self.checkpoint, self.dtype, self.device)
        class_name = self.checkpoint.components["text_encoder"]
        source = WeightSource(self.checkpoint.stored("text_encoder"), class_name)
        self._changes[encoder] = WeightChanges(encoder, "text_encoder", class_name, source, {})
        return encoder

    def vae(self, axis: Axis, work: int) -> Any:
        """Return the VAE, a module of diffusers, with room to work. Collective over the axis.

        Args:
            axis: the ranks that work.
            work: bytes that this rank's tensors take at least.

        Raises:
            NoRoom: weights and tensors together do not fit. Names numbers and remedies.
        """
        weights = vae_bytes(self.checkpoint)
        (claims,) = claims_of_all(axis, self.memory.claim(weights + work))
        check_work(claims, f"{self.name}'s VAE", [_TILES, _MORE_DEVICES])
        missing = 0 if self.has("vae") else weights
        self.memory.free_up(missing + work + work // _SLACK, self, keep=("vae",), ranks=axis.size)
        return self._part("vae", lambda: load_vae(self.checkpoint, self.device))

    def describe(self, stamp: str) -> LoadedModel:
        """Describe what is loaded from the files that have this stamp. Safe to call from another thread."""
        return LoadedModel(
            path=str(self.checkpoint.path),
            stamp=stamp,
            layout=self._layout,
            dtype=NAMES[self.dtype],
            parts=tuple(sorted(self._parts.copy())),
            loads=self.loads,
            note=f"the VAE works on one rank: {self.whole_vae}" if self.whole_vae else "",
        )

    def _part(self, name: str, load: Callable[[], T]) -> T:
        if name not in self._parts:
            from . import partial

            part: Any = self._with_room(load)
            self._bytes[name] = partial.local_bytes(part.module if isinstance(part, Family) else part)
            self._parts[name] = part
            self.loads += 1
        return cast(T, self._parts[name])

    def _with_room(self, work: Callable[[], T], keep: Collection[str] = ()) -> T:
        """Return the result of ``work``. Whenever the device is full, free what is next in the order, and retry."""
        while True:
            try:
                return work()
            except torch.OutOfMemoryError:
                if not self.memory.free_next(self, keep):
                    raise

    def _holds(self, name: str, held: WeightPart) -> bool:
        return name in self._parts and self._held.get(name) == held
