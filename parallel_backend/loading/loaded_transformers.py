"""The transformers of one checkpoint on this rank: which part of each it holds, where, and on which mesh."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from .. import processes
from ..checkpoint.checkpoint import HIGH_NOISE, LOW_NOISE, Checkpoint, file_state
from ..distributed.collectives import agree, all_true
from ..distributed.mesh import RankMesh
from ..interfaces.family import Family
from ..protocol.model_spec import Adapter, Overlay
from .compiled_blocks import CompiledBlocks
from .cpu_store import share
from .offload_plan import ALL, SLOTS, UNDECIDED, PartSizes, TransformerClaim, decide, lacks_cpu_memory, with_slack
from .parts import Parts, free
from .room import claims_of_all
from .transformer_part import PlannedTransformer, plan_transformer
from .weight_changes import WeightChanges
from .weight_source import WeightSource

log = logging.getLogger(__name__)

_NO_MESH = -1
"""Stands for no mesh where a mesh's serial number is expected."""


@dataclass(frozen=True, kw_only=True)
class WeightPart:
    """Which part of the weights a rank holds.

    Attributes:
        pipe: index of the stage, and the stages' speeds, by which the blocks are cut.
        tensor: degree of ``tensor``, and this rank's index on it: its part of the stage.
        cut: by what the ranks of ``tensor`` share columns and heads.
        sharers: the ranks that shard that part among them; empty without sharding.
    """

    pipe: tuple[int, tuple[float, ...]]
    tensor: tuple[int, int]
    cut: tuple[tuple[float, ...], tuple[float, ...]]
    sharers: tuple[int, ...]

    @property
    def alone(self) -> bool:
        """Whether neither loading these weights nor computing with them needs a process group."""
        return self.tensor[0] == 1 and not self.sharers

    @classmethod
    def on(cls, mesh: RankMesh) -> "WeightPart":
        """Return the part that this rank of the mesh holds."""
        tensor, sharers = mesh.axes["tensor"], mesh.sequence.ranks if mesh.layout.shard_weights else ()
        weights = mesh.split.weights
        return cls(
            pipe=(mesh.axes["pipe"].index, mesh.split.stages),
            tensor=(tensor.size, tensor.index),
            cut=(weights.columns, weights.cut_heads),
            sharers=sharers,
        )


@dataclass(frozen=True, kw_only=True)
class _Agreed:
    """What the ranks that hold a part have agreed on: its sizes, and how many of its blocks stay on the devices."""

    part: WeightPart
    sizes: PartSizes
    resident: int


class Transformers:
    """The transformers of a checkpoint, in one dtype, on this rank's device."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, parts: Parts) -> None:
        self.checkpoint, self.dtype, self.parts, self.device = checkpoint, dtype, parts, parts.memory.device
        self._work = 0
        self._held: dict[str, WeightPart] = {}
        self._meshes: dict[str, RankMesh] = {}
        self._agreed: dict[str, _Agreed] = {}
        self._sources: dict[str, tuple[tuple[object, ...], WeightSource]] = {}

    @property
    def names(self) -> list[str]:
        """The transformers that the checkpoint has."""
        return [name for name in (HIGH_NOISE, LOW_NOISE) if name in self.checkpoint.components]

    def missing(self, mesh: RankMesh) -> list[str]:
        """Return the transformers whose part for this rank of the mesh is not loaded."""
        held = WeightPart.on(mesh)
        return [name for name in self.names if not self._holds(name, held)]

    def prepare(self, mesh: RankMesh, work: int, *, stream: bool) -> dict[str, PlannedTransformer]:
        """Decide what stays on the devices, and plan what is missing. Collective over the mesh.

        Args:
            work: bytes that this rank's tensors take at least.
            stream: whether blocks may stream.

        Returns:
            The parts that this rank has to load, by name. They take no memory.

        Raises:
            InvalidRequest: the weights do not fit, not even streamed. Names numbers and remedies.
            NoRoom: weights and tensors together do not fit. Names numbers and remedies.
        """
        held = WeightPart.on(mesh)
        plans = {name: self._plan(mesh, name, ALL) for name in self.names if not self._knows(name, held)}
        sizes = {name: plans[name].sizes if name in plans else self._agreed[name].sizes for name in self.names}
        claims = claims_of_all(mesh.all_ranks, self._claim(mesh, held, list(sizes.values()), work))
        targets = decide(claims, self.parts.name, self.dtype, stream=stream)
        if targets != [each.resident for each in claims]:
            self._settle(mesh, held, sizes, claims, targets)
        self._work = with_slack(work)
        missing, resident, memory = self.missing(mesh), targets[mesh.all_ranks.index], self.parts.memory
        if not missing and claims[mesh.all_ranks.index].lacks(self._work, memory.sharers(mesh.all_ranks.size)):
            memory.free_up(self._work, self.parts, keep=(HIGH_NOISE,), ranks=mesh.all_ranks.size)
        planned = plans if resident == ALL else {}
        return {name: planned.get(name) or self._plan(mesh, name, resident) for name in missing}

    def get(
        self,
        mesh: RankMesh,
        name: str,
        plans: dict[str, PlannedTransformer],
        adapters: Sequence[Adapter],
        overlay: Overlay | None,
        *,
        compiled: bool,
    ) -> Family:
        """Return this rank's part, on a mesh, of the transformer component ``name``; load it if necessary.

        Meshes on which the rank holds the same part share the loaded weights. Of another part, it reads what it lacks.

        Args:
            plans: parts that have been planned for the mesh, by name. Loading takes its plan out.
            compiled: whether its blocks compute compiled from now on.
        """
        held = WeightPart.on(mesh)
        if not self._holds(name, held):
            self._drop_other_part(name, held)
        missing = not self.parts.has(name)
        if missing:
            self._meshes.pop(name, None)
            if not held.alone:
                self._meshes[name] = mesh
        self._held[name] = held
        agreed = self._agreed[name]
        taken = None if agreed.resident == ALL else agreed.sizes.on_device(agreed.resident)
        family = self.parts.get(name, lambda: self._load(mesh, name, plans), taken)
        if missing or compiled:
            self._limit_spare(name, compiled=compiled, ranks=mesh.all_ranks.size)
        self.parts.changed_by(name, lambda changes: changes.use(adapters, overlay, compiled=compiled))
        family.changes = (tuple(adapters), overlay)
        if compiled or name in self.parts.compiled:
            self.parts.compiled.setdefault(name, CompiledBlocks(family)).use(compiled)
        return family

    def agree(self, mesh: RankMesh) -> None:
        """Drop parts that the ranks of the mesh do not all hold on the groups of one mesh.

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
            shared = all_true(all_true(serial == first != _NO_MESH, tensor), sequence)
            if self._holds(name, held) and not shared:
                self.parts.drop(name)

    def meshes(self) -> list[RankMesh]:
        """Return the meshes whose groups the loaded transformers use."""
        return [mesh for name, mesh in self._meshes.items() if self.parts.has(name)]

    @property
    def note(self) -> str:
        """How much streams, for people; "" if nothing does."""
        agreed = self._agreed.get(HIGH_NOISE)
        if agreed is None or agreed.resident == ALL:
            return ""
        blocks = len(agreed.sizes.blocks)
        return f"{blocks - agreed.resident} of {blocks} blocks stream from the machine's memory"

    def _claim(self, mesh: RankMesh, held: WeightPart, sizes: Sequence[PartSizes], work: int) -> TransformerClaim:
        memory = self.parts.memory
        mine = memory.claim(max(each.whole for each in sizes))
        agreed = {self._agreed[name].resident if self._knows(name, held) else UNDECIDED for name in self.names}
        blocks = min(len(each.blocks) for each in sizes)
        return TransformerClaim(
            **asdict(mine), whole=mine.needed, work=work,
            least=max(each.on_device(0) for each in sizes) if blocks > SLOTS else mine.needed,
            block=max(max(each.blocks) for each in sizes), blocks=blocks,
            resident=agreed.pop() if len(agreed) == 1 else UNDECIDED,
            part=mesh.axes["pipe"].index * mesh.axes["tensor"].size + mesh.axes["tensor"].index,
            experts=len(sizes),
            cpu_free=mine.free if mine.on_cpu else processes.machine_memory()[0],
            # Ranks outside of the mesh would keep the memory.
            cpu_idle=memory.idle_cpu_bytes(self.parts) if mesh.all_ranks.size == memory.ranks else 0,
            cpu_own=self.parts.cpu_bytes,
        )  # fmt: skip

    def _settle(
        self,
        mesh: RankMesh,
        held: WeightPart,
        sizes: Mapping[str, PartSizes],
        claims: Sequence[TransformerClaim],
        targets: Sequence[int],
    ) -> None:
        """Adopt what the ranks decided: drop what has to be loaded anew, and make the memory that blocks stream from.

        Collective over the mesh if anything streams.
        """
        mine, target = claims[mesh.all_ranks.index], targets[mesh.all_ranks.index]
        same_part = [rank for rank, each in enumerate(claims) if each.part == mine.part]
        # Ranks that stream load together. A whole part concerns nobody else.
        whole = target == ALL and mine.resident in (ALL, UNDECIDED)
        stays = whole or all(claims[rank].resident == target for rank in same_part)
        if lacks_cpu_memory(claims, targets):
            self.parts.memory.release_cpu(self.parts)
        for name in self.names:
            if not stays or (target == ALL and name in self.parts.stores):
                self.parts.drop_with_store(name)
            self._agreed[name] = _Agreed(part=held, sizes=sizes[name], resident=target)
        if any(each != ALL for each in targets):
            free(self.device)
            self._share(mesh, {name: 0 if stays else sizes[name].in_cpu(target) for name in self.names}, mine.part)
        if target != ALL and not stays:
            log.warning("%s has no room for all of %s: %s", self.device, self.parts.name, self.note)

    def _share(self, mesh: RankMesh, sizes: Mapping[str, int], part: int) -> None:
        """Make the memory that blocks stream from, with ranks that hold the same part. Collective over the mesh."""
        for name, nbytes in sizes.items():
            store = share(nbytes, part, self.device, mesh.all_ranks)
            if store:
                self.parts.stores[name] = store

    def _drop_other_part(self, name: str, wanted: WeightPart) -> None:
        """Free this rank's other part, but not its weights unless it, or what is wanted, streams or is shared."""
        other, agreed = self._held.get(name), self._agreed[name]
        streams = agreed.resident != ALL or name in self.parts.stores
        if not self.parts.has(name) or other is None or other.sharers or wanted.sharers or streams:
            self.parts.drop(name)
        else:
            self.parts.drop_for_part(name)

    def _load(self, mesh: RankMesh, name: str, plans: dict[str, PlannedTransformer]) -> Family:
        agreed = self._agreed[name]
        plan = plans.pop(name) if name in plans else self._plan(mesh, name, agreed.resident)
        self._make_room(name, plan, mesh.all_ranks.size)
        family = plan.fill(self.parts.stores.get(name), self.parts.held.get(name))
        changes = WeightChanges(family.module, name, plan.class_name, plan.source, plan.slices, plan.blocks)
        self.parts.track(name, changes)
        return family

    def _make_room(self, name: str, plan: PlannedTransformer, ranks: int) -> None:
        """Make room for what loading a part takes. Where that frees what is held of it, all of it has to be read."""
        weights, memory = self.parts.held.get(name), self.parts.memory
        if weights is not None:
            memory.free_up(weights.missing(plan.family.module, plan.slices), self.parts, ranks=ranks)
        if weights is None or not weights.spare:
            memory.free_up(plan.nbytes + self._work, self.parts, ranks=ranks)

    def _limit_spare(self, name: str, *, compiled: bool, ranks: int) -> None:
        """Make room for tensors beside a part, and free weights beyond it unless as much as the part is free.

        Where blocks compile, none stay: freeing them later changes strides, and the code would be compiled again.
        """
        weights, memory = self.parts.held.get(name), self.parts.memory
        if weights is None:
            return
        if compiled or memory.lacks(self._agreed[name].sizes.whole + self._work, ranks):
            self.parts.free_spare()
        if not weights.spare:
            del self.parts.held[name]
        memory.free_up(self._work, self.parts, keep=(name,), ranks=ranks)

    def _plan(self, mesh: RankMesh, name: str, resident: int) -> PlannedTransformer:
        """Plan this rank's part. Headers are read again only if a file has changed since."""
        stored = self.checkpoint.stored(name)
        files = tuple(map(file_state, stored.files))
        if name not in self._sources or self._sources[name][0] != files:
            self._sources[name] = files, WeightSource(stored, self.checkpoint.components[name])
        source = self._sources[name][1]
        return plan_transformer(self.checkpoint, self.dtype, self.device, mesh, name, resident, source)

    def _knows(self, name: str, held: WeightPart) -> bool:
        """Whether this rank has agreed with the others on where its part goes."""
        agreed = self._agreed.get(name)
        return agreed is not None and agreed.part == held and (agreed.resident == ALL or name in self.parts.stores)

    def _holds(self, name: str, held: WeightPart) -> bool:
        return self.parts.has(name) and self._held.get(name) == held
