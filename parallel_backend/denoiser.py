"""One transformer on one mesh: what a rank computes of a denoiser call, and how results come together."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from .attention import routed
from .collectives import gather, join
from .mesh import DeviceMesh
from .models import Family
from .partition import Partition
from .strategies import BatchSplit, Ulysses
from .validation import Denoising

Inputs = Mapping[str, Tensor]


class Denoiser:
    """Runs this rank's rows (branches of samples) on this rank's tokens.

    ``on_forward`` is called once per transformer forward.
    """

    def __init__(self, family: Family, mesh: DeviceMesh, plan: Denoising, on_forward: Callable[[], None]) -> None:
        self.family, self.mesh, self.plan, self.on_forward = family, mesh, plan, on_forward
        self.place = mesh.coordinates(mesh.whole.index)
        self.branches = BatchSplit.branches(mesh, plan.branches, self.place)

    def samples(self, branch: int) -> slice:
        """The samples of a branch that this rank computes."""
        return BatchSplit.samples(self.mesh, self.plan.latents[branch][0], self.place)

    def shards(self, branches: Mapping[int, Inputs]) -> dict[int, Tensor]:
        """Predict this rank's tokens ``[own samples, own tokens, values]`` of each of its branches.

        ``branches`` holds the inputs of this rank's samples. Rows of equal shapes run as one batch.
        """
        predicted: dict[int, Tensor] = {}
        for group in _equal_shapes(branches):
            batch = {name: join([branches[i][name] for i in group]) for name in branches[group[0]]}
            sizes = [branches[i][self.family.latent].shape[0] for i in group]
            predicted.update(zip(group, torch.split(self._predict(batch, group[0]), sizes), strict=True))
        return {i: predicted[i] for i in branches}

    def gather(self, shards: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The whole predictions ``[B, C, T, H, W]`` of all branches on rank 0; nothing on other ranks."""
        own = join([shard.reshape(-1) for shard in shards.values()]) if shards else self._empty()
        plans = [self._shard_shapes(rank) for rank in range(self.mesh.whole.size)]
        sizes = [sum(shape.numel() for shape in shapes.values()) for shapes in plans]
        received = gather(own, sizes, self.mesh.whole)
        if self.mesh.whole.index != 0:
            return {}
        parts = [
            dict(zip(shapes, torch.split(flat, [shape.numel() for shape in shapes.values()]), strict=True))
            for flat, shapes in zip(received, plans, strict=True)
        ]
        return {i: self._assemble(i, parts, plans) for i in range(self.plan.branches)}

    def _attention(self, tokens: int) -> AbstractContextManager[None]:
        axis = self.mesh.axes["ulysses"]
        if axis.size == 1:
            return nullcontext()
        seam = Ulysses.attention(axis, tokens=tokens, heads=self.plan.geometry.heads)
        return routed(self.family.attentions, seam)

    def _predict(self, inputs: Inputs, branch: int) -> Tensor:
        axis = self.mesh.axes["ulysses"]
        rows = inputs[self.family.latent].shape[0]
        tokens = self.plan.tokens(branch)
        if not rows:
            own = Partition.even(tokens, axis.size).sizes[axis.index]
            return self._empty().view(0, own, self.plan.geometry.values)
        self.on_forward()
        state = Ulysses.shard(self.family.embed(inputs), axis)
        with self._attention(tokens):
            for block in self.family.blocks:
                state = block(state)
        return self.family.head(state)

    def _empty(self) -> Tensor:
        return torch.empty(0, dtype=self.family.dtype, device=self.family.device)

    def _shard_shapes(self, rank: int) -> dict[int, torch.Size]:
        place = self.mesh.coordinates(rank)
        shapes = {}
        for i in BatchSplit.branches(self.mesh, self.plan.branches, place):
            samples = BatchSplit.samples(self.mesh, self.plan.latents[i][0], place)
            tokens = Partition.even(self.plan.tokens(i), self.mesh.layout.ulysses).sizes[place["ulysses"]]
            shapes[i] = torch.Size((samples.stop - samples.start, tokens, self.plan.geometry.values))
        return shapes

    def _assemble(
        self, branch: int, parts: Sequence[Mapping[int, Tensor]], plans: Sequence[Mapping[int, torch.Size]]
    ) -> Tensor:
        rows: dict[int, list[Tensor]] = {}
        for rank, part in enumerate(parts):
            if branch in part:
                shard = part[branch].view(plans[rank][branch])
                rows.setdefault(self.mesh.coordinates(rank)["data"], []).append(shard)
        tokens = join([join(shards, dim=1) for _, shards in sorted(rows.items())])
        return self.family.unpatchify(tokens, self.plan.latents[branch][2:])


def _equal_shapes(branches: Mapping[int, Inputs]) -> list[list[int]]:
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, inputs in branches.items():
        key = tuple(sorted((name, tuple(tensor.shape), tensor.dtype.itemsize) for name, tensor in inputs.items()))
        groups.setdefault(key, []).append(i)
    return list(groups.values())
