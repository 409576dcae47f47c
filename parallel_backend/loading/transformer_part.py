"""A rank's part of a transformer: planned without memory, and filled with its weights."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..checkpoint.checkpoint import Checkpoint
from ..distributed.mesh import Axis, RankMesh
from ..families.modules import module_class_of
from ..families.registry import family_of
from ..interfaces.family import Family
from ..interfaces.state import State
from ..interfaces.tensor_cuts import Slices
from ..strategies import stage_cut
from .cpu_store import CpuStore
from .held_weights import HeldWeights
from .load import shapes_of
from .offload_plan import ALL, SLOTS, PartSizes, streamed
from .streamed_blocks import StreamedBlocks, streamable
from .weight_source import WeightSource


@dataclass(frozen=True, kw_only=True)
class PlannedTransformer:
    """This rank's part of a transformer before its weights are read; it takes no memory.

    Attributes:
        family: the part on the meta device, cut and, unless blocks stream, sharded.
        source: the weights of the files.
        class_name: diffusers' class.
        slices: the slices of parameters that were cut.
        device: where the weights go.
        sizes: what the part takes.
        resident: how many of its blocks stay on the device, or ``ALL``.
        blocks: the blocks that stream; None if all stay.
    """

    family: Family
    source: WeightSource
    class_name: str
    slices: Slices
    device: torch.device
    sizes: PartSizes
    resident: int
    blocks: StreamedBlocks | None

    @property
    def nbytes(self) -> int:
        """Bytes that the part takes on the device."""
        return self.sizes.on_device(self.resident)

    def fill(self, store: CpuStore | None = None, held: HeldWeights | None = None) -> Family:
        """Read the weights. What is half read after an error is of no use: plan again.

        Args:
            store: where the blocks stream from, if some do.
            held: weights of another part that this rank held, which are not read again; None without any.
        """
        from . import partial

        module, homes = self.family.module, {}
        if self.blocks is not None:
            assert store is not None
            self.blocks.place(store, self.device)
            homes = self.blocks.homes
        filled = held.fill(module, self.slices, self.source) if held else frozenset[str]()
        partial.allocate(module, self.device)
        stays = [name for name in module.state_dict() if name not in homes and name not in filled]
        partial.read_parameters(module, self.source, self.slices, only=stays)
        if store is not None:
            store.fill(lambda: partial.read_parameters(module, self.source, self.slices, only=homes, homes=homes))
        module.eval().requires_grad_(False)
        return self.family


def load_transformer(
    checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, mesh: RankMesh, component: str = "transformer"
) -> Family:
    """Load this rank's part of a transformer. What diffusers keeps in float32 stays so."""
    return plan_transformer(checkpoint, dtype, device, mesh, component).fill()


def plan_transformer(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    mesh: RankMesh,
    component: str,
    resident: int = ALL,
    source: WeightSource | None = None,
) -> PlannedTransformer:
    """Build this rank's part of a transformer without weights, wrapped in its family. Reads headers alone.

    Args:
        resident: how many blocks stay on the device. If some stream, no rank shards its weights.
        source: the component's files, whose headers are not read again; None to read them.

    Raises:
        InvalidRequest: the files do not hold the weights of this transformer.
    """
    name = checkpoint.components[component]
    source = source or WeightSource(checkpoint.stored(component), name)
    whole = _whole(checkpoint, component, dtype, source)
    part, slices = _cut(family_of(name), whole, checkpoint.config(component), mesh)
    sizes = sizes_of(part, sharers=mesh.sequence.size if mesh.weights_axis else 1)
    moved = streamed(len(sizes.blocks), resident)
    if mesh.weights_axis and not moved:
        _shard(part, mesh.weights_axis, device.type)
    streams = StreamedBlocks(part, moved) if moved else None
    return PlannedTransformer(
        family=part, source=source, class_name=name, slices=slices, device=device, sizes=sizes,
        resident=resident, blocks=streams,
    )  # fmt: skip


def whole_sizes(checkpoint: Checkpoint, dtype: torch.dtype, component: str) -> PartSizes:
    """Return what a whole transformer takes."""
    name = checkpoint.components[component]
    source = WeightSource(checkpoint.stored(component), name)
    return sizes_of(family_of(name)(_whole(checkpoint, component, dtype, source)))


def _whole(checkpoint: Checkpoint, component: str, dtype: torch.dtype, source: WeightSource) -> nn.Module:
    """Return a whole transformer on the meta device after a check of its files."""
    from . import partial
    from .compressed_linear import keep_compressed

    module_class = module_class_of(checkpoint.components[component])
    module = partial.empty(module_class, checkpoint.config(component), dtype)
    source.check(shapes_of(module), counted=not checkpoint.path.is_dir())
    keep_compressed(module, source)
    return module


def _cut(family: type[Family], module: nn.Module, config: dict[str, Any], mesh: RankMesh) -> tuple[Family, Slices]:
    """Reduce a whole transformer on the meta device to this rank's part, and return the slices of what was cut."""
    from ..strategies import tensor

    layout = mesh.layout
    slices: Slices = {}
    if layout.tensor > 1:
        groups = {site.groups for site in family.describe(config).sites}
        slices = tensor.cut(module, family.cuts(config), mesh.axes["tensor"], mesh.split, groups)
    part = family(module)
    if layout.pipe > 1:
        part.keep_blocks(stage_cut.blocks(part, mesh.split.stages).slice(mesh.axes["pipe"].index))
    return part, slices


def _shard(part: Family, axis: Axis, device_type: str) -> None:
    """Let the ranks of an axis share the weights of the blocks."""
    from ..strategies import sharded_weights

    modules = [module for block in part.blocks for module in block.modules]

    def used(state: State) -> list[nn.Module]:
        return [module for block in part.used_blocks(state) for module in block.modules]

    part.run = sharded_weights.shard(modules, part.run, axis, device_type, used)


def sizes_of(part: Family, *, sharers: int = 1) -> PartSizes:
    """Return what a part takes on a device.

    Args:
        part: the part, on the meta device.
        sharers: number of ranks that share the weights of its blocks.
    """
    from . import partial

    parameters = [
        [parameter for module in block.modules for parameter in module.parameters()]
        for block in part.blocks
        if block.modules
    ]
    taken = partial.local_bytes(part.module)
    if sharers > 1:
        taken -= sum(each.nbytes for block in parameters for each in block)
        taken += sum(_shard_bytes(each, sharers) for block in parameters for each in block)
        taken += SLOTS * max(sum(each.nbytes for each in block) for block in parameters)  # one computes, one arrives
    blocks = tuple(streamable(block, part) for block in part.blocks if block.modules)
    return PartSizes(whole=taken, outside=max(0, partial.local_bytes(part.module) - sum(blocks)), blocks=blocks)


def _shard_bytes(parameter: nn.Parameter, sharers: int) -> int:
    """Return the bytes of the largest shard by rows."""
    rows, *rest = parameter.shape or (1,)
    return -(-rows // sharers) * math.prod(rest) * parameter.element_size()
