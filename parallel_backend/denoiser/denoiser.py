"""One denoiser call on one mesh: what this rank computes, and how the ranks' results are put together."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from ..attention.kernels import Kernel
from ..attention.routing import Route, routed
from ..distributed.collectives import concat, gather
from ..distributed.mesh import RankMesh
from ..distributed.trials import Trials
from ..interfaces.family import Family
from ..interfaces.geometry import IMAGE, LATENT, TIMESTEP, common_tokens
from ..interfaces.run_cache import RunCache
from ..interfaces.state import State
from ..strategies.batch import BatchSplit
from ..strategies.token_split import TokenSplit
from . import stage_boundary
from .attention_views import FullView
from .change_gate import ChangeGate
from .experts import Experts
from .plan import DenoisingPlan

Inputs = Mapping[str, Tensor]


class Denoiser:
    """Runs this rank's samples and branches on this rank's tokens.

    Args:
        on_forward: called once for each forward of a transformer.
        trials: see ``UlyssesAttention``.

    Attributes:
        branches: those that this rank computes.
        samples: those of each branch that this rank computes.
        predicted: names of the streams whose tokens are predicted.
        cache: what has been computed for all steps.
    """

    def __init__(
        self,
        experts: Experts,
        mesh: RankMesh,
        plan: DenoisingPlan,
        kernel: Kernel,
        on_forward: Callable[[], None],
        trials: Trials,
    ) -> None:
        self.experts, self.mesh, self.plan, self.kernel, self.on_forward = experts, mesh, plan, kernel, on_forward
        self.place = plan.layout.coordinates(mesh.all_ranks.index)
        self.branches = BatchSplit.branches(mesh, plan.branches, self.place)
        self.samples = {i: BatchSplit.samples(mesh, plan.samples[i], self.place) for i in range(plan.branches)}
        self._common = common_tokens(plan.extents)
        self.predicted, self.cache = plan.extents[0].predicted, RunCache()
        self._changing = {*plan.latents[0], TIMESTEP}
        self._batches: list[list[int]] | None = None
        self.boundary = stage_boundary.StageBoundary(mesh.axes["pipe"], mesh.pipe_links or ())
        self._splits = [
            TokenSplit(axis=mesh.sequence, streams=plan.split.streams(extent.streams), whole=extent.whole)
            for extent in plan.extents
        ]
        self.full_view = FullView(mesh, self._splits, trials)
        self._routes: dict[tuple[int, int], list[Route]] = {}
        self._routed = ""

    def own(self, branch: int, inputs: Inputs) -> Inputs:
        """Cut a branch's inputs to this rank's samples. What no step changes is the same object in all steps."""
        samples = self.samples[branch]
        if samples.stop - samples.start == self.plan.samples[branch]:
            return inputs
        return {name: self._cut(name, tensor, samples) for name, tensor in inputs.items()}

    def joined(self, inputs: Sequence[Inputs]) -> Inputs:
        """Join the inputs of branches to one batch. What no step changes is the same object in all steps."""
        if len(inputs) == 1:
            return inputs[0]
        return {name: self._joined(name, [each[name] for each in inputs]) for name in inputs[0]}

    def embed(self, family: Family, inputs: Inputs) -> State:
        """The whole state before block 0."""
        return family.embed_in(self.cache, inputs)

    def load(self, branches: Mapping[int, Inputs]) -> None:
        """Load the weights that ``shards`` needs for these inputs, now instead of lazily."""
        for i, inputs in branches.items():
            if inputs[LATENT].shape[0]:
                self._family(i, inputs)

    def shards(self, branches: Mapping[int, Inputs], view: FullView | None = None) -> dict[int, Tensor]:
        """Predict this rank's tokens ``[local samples, local tokens, values]`` of each of its branches.

        Branches with equal shapes, positions and blocks run as one batch. With pipeline stages each row runs by itself,
        only the last stage predicts, and the other stages return no tokens.

        Args:
            branches: inputs of this rank's samples, by branch.
            view: what attention sees; by default all tokens.
        """
        view = view or self.full_view
        predicted: dict[int, Tensor] = {}
        if self.boundary.axis.size > 1:
            predicted = {
                i: concat([self._predict(row, i, view, j) for j, row in enumerate(self._rows(inputs))])
                for i, inputs in branches.items()
            }
            self.boundary.finish()
            return predicted
        for group in self._groups(branches):
            batch = self.joined([branches[i] for i in group])
            predicted |= self._split(branches, group, self._predict(batch, group[0], view))
        return {i: predicted[i] for i in branches}

    def shards_unless(self, branches: Mapping[int, Inputs], gate: ChangeGate, *, may: bool) -> dict[int, Tensor] | None:
        """Run the first block of all batches, and the rest unless ``gate`` says that the call is to be forecast.

        Not with pipeline stages. Collective over all ranks if it may say so.

        Args:
            branches: see ``shards``.
            may: whether the call may be forecast.

        Returns:
            See ``shards``; None, on all ranks alike, for a forecast.
        """
        begun: list[tuple[list[int], Inputs, State | None]] = []
        for group in self._groups(branches):
            batch = self.joined([branches[i] for i in group])
            begun.append((group, batch, self._first_block(batch, group, gate)))
        if gate.skips(may=may):
            return None
        predicted: dict[int, Tensor] = {}
        for group, batch, state in begun:
            predicted |= self._split(branches, group, self._other_blocks(batch, group[0], state))
        return {i: predicted[i] for i in branches}

    def _groups(self, branches: Mapping[int, Inputs]) -> list[list[int]]:
        """The branches that run as one batch each, equal in all calls: comparing makes the host wait for a GPU."""
        if self._batches is None:
            self._batches = alike(branches, self.plan.variants)
        return self._batches

    @staticmethod
    def _split(branches: Mapping[int, Inputs], group: Sequence[int], predicted: Tensor) -> dict[int, Tensor]:
        sizes = [branches[i][LATENT].shape[0] for i in group]
        return dict(zip(group, torch.split(predicted, sizes), strict=True))

    def comparable(self, shards: Mapping[int, Tensor]) -> Tensor:
        """The predictions of this rank's branches for the same tokens: ``[branches, B, tokens, values]``.

        These are this rank's tokens. If one branch has more reference tokens than another, their tokens are split at
        different places; then these are all tokens that the branches have in common.
        """
        if self._common is not None:
            whole = {i: self._splits[i].unshard(shard, self.predicted) for i, shard in shards.items()}
            shards = {i: self.first_tokens(i, tokens, self._common) for i, tokens in whole.items()}
        return torch.stack(list(shards.values()))

    def latent(self, guided: Tensor) -> Tensor:
        """The latent of guided tokens ``[B, tokens, values]`` from ``comparable``, on every rank of the sequence.

        Several latents are packed, as in ``gather``.
        """
        whole = self._splits[0].unshard(guided, self.predicted) if self._common is None else guided
        return self.experts.current.prediction(whole, self.plan.sizes())

    def first_tokens(self, branch: int, tokens: Tensor, counts: Sequence[int]) -> Tensor:
        """Keep the first of a branch's tokens of each predicted stream, ``counts`` of it."""
        lengths = [self.plan.extents[branch].streams[name] for name in self.predicted]
        parts = zip(tokens.split(lengths, dim=1), counts, strict=True)
        return concat([part[:, :count] for part, count in parts], dim=1)

    def gather(self, shards: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """The whole predictions ``[B, C, ...]`` of all branches on rank 0; empty on other ranks."""
        by_rank = self._shapes_by_rank
        sends = bool(by_rank[self.mesh.all_ranks.index])
        local = concat([shard.reshape(-1) for shard in shards.values()]) if sends else self._empty()
        sizes = [sum(shape.numel() for shape in shapes.values()) for shapes in by_rank]
        received = gather(local, sizes, self.mesh.all_ranks)
        if self.mesh.all_ranks.index != 0:
            return {}
        parts = [
            dict(zip(shapes, torch.split(flat, [shape.numel() for shape in shapes.values()]), strict=True))
            for flat, shapes in zip(received, by_rank, strict=True)
        ]
        return {i: self._assemble(i, parts, by_rank) for i in range(self.plan.branches)}

    def _predict(self, inputs: Inputs, branch: int, view: FullView, row: int = 0) -> Tensor:
        split, extent = view.splits[branch], self.plan.extents[branch]
        if not inputs[LATENT].shape[0]:
            tokens = split.predicted(self.predicted)[split.axis.index] if self.boundary.last else 0
            return self._empty().view(0, tokens, extent.values)
        self.on_forward()
        family = self._family(branch, inputs)
        state = self.embed(family, inputs)
        lengths = {name: tokens.shape[1] for name, tokens in state.streams.items()}
        assert lengths == dict(extent.streams), f"embed made streams of {lengths}, but {extent.streams} were planned"
        state = replace(split.shard(state), skipped=self.plan.skipped[branch])
        if not self.boundary.first:
            incoming = self.boundary.expect(stage_boundary.shapes(state), state.streams[IMAGE])
            state = state.with_streams(**incoming.wait())
        with routed(self._routes_of(view, family, (branch, row), state)):
            state = family.run(state)
        if self.boundary.last:
            return family.head(split.shard_whole(state))
        self.boundary.send(state.streams)
        return self._empty().view(len(inputs[LATENT]), 0, extent.values)

    def _first_block(self, inputs: Inputs, group: Sequence[int], gate: ChangeGate) -> State | None:
        """Run a batch's first block, and let ``gate`` measure it; None if this rank has no sample of it."""
        if not inputs[LATENT].shape[0]:
            return None
        family = self._family(group[0], inputs)
        state = self.full_view.splits[group[0]].shard(self.embed(family, inputs))
        state = replace(state, skipped=self.plan.skipped[group[0]], part="first")
        rows = [(i, sample) for i in group for sample in range(self.samples[i].start, self.samples[i].stop)]
        with routed(self._routes_of(self.full_view, family, (group[0], 0), state)), gate.measuring(family, state, rows):
            return gate.measured(family.run(state))

    def _other_blocks(self, inputs: Inputs, branch: int, state: State | None) -> Tensor:
        """Run a batch's other blocks, and predict this rank's tokens."""
        split = self.full_view.splits[branch]
        if state is None:
            tokens = split.predicted(self.predicted)[split.axis.index]
            return self._empty().view(0, tokens, self.plan.extents[branch].values)
        self.on_forward()
        family = self._family(branch, inputs)
        with routed(self._routes_of(self.full_view, family, (branch, 0), state)):
            return family.head(split.shard_whole(family.run(replace(state, part="rest"))))

    def _rows(self, inputs: Inputs) -> list[Inputs]:
        """The inputs of each sample by itself; the inputs as they are if there is no sample."""
        batch = len(inputs[LATENT])
        if batch < 2:
            return [inputs]
        return [
            {name: self._cut(name, tensor, slice(i, i + 1)) for name, tensor in inputs.items()} for i in range(batch)
        ]

    def _cut(self, name: str, tensor: Tensor, samples: slice) -> Tensor:
        if name in self._changing:
            return tensor[samples]
        return self.cache.get((samples.start, samples.stop), (tensor,), lambda: tensor[samples])

    def _joined(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        return concat(parts) if name in self._changing else self.cache.get("batch", parts, lambda: concat(parts))

    def _routes_of(self, view: FullView, family: Family, row: tuple[int, int], state: State) -> list[Route]:
        """Where the attention of a row, or of all rows of a branch, goes. With all tokens in view it stays the same."""
        if view is not self.full_view:
            return view.routes(family, row[0], state, self.kernel)
        if row not in self._routes:
            self._routes[row] = view.routes(family, row[0], state, self.kernel)
        return self._routes[row]

    def _family(self, branch: int, inputs: Inputs) -> Family:
        """The transformer for a branch, with its LoRAs."""
        self.experts.adapters = self.plan.adapters[branch]
        name = self.experts.name(inputs[TIMESTEP])
        if name != self._routed:  # routes hold modules, which may have to leave for the other transformer's
            self._routes, self._routed = {}, name
        return self.experts.at(inputs[TIMESTEP])

    def _empty(self) -> Tensor:
        family = self.experts.current
        return torch.empty(0, dtype=family.dtype, device=family.device)

    @cached_property
    def _shapes_by_rank(self) -> list[dict[int, torch.Size]]:
        return [self._shard_shapes(rank) for rank in range(self.mesh.all_ranks.size)]

    def _shard_shapes(self, rank: int) -> dict[int, torch.Size]:
        """Shapes of what ``rank`` sends to rank 0, by branch. Of ranks with the same tokens only the first sends."""
        place = self.plan.layout.coordinates(rank)
        if place["tensor"] or place["pipe"] != self.boundary.axis.size - 1:
            return {}
        shapes = {}
        for i in BatchSplit.branches(self.mesh, self.plan.branches, place):
            samples = BatchSplit.samples(self.mesh, self.plan.samples[i], place)
            tokens = self._splits[i].predicted(self.predicted)[place["sequence"]]
            shapes[i] = torch.Size((samples.stop - samples.start, tokens, self.plan.extents[i].values))
        return shapes

    def _assemble(
        self, branch: int, parts: Sequence[Mapping[int, Tensor]], by_rank: Sequence[Mapping[int, torch.Size]]
    ) -> Tensor:
        rows: dict[int, list[Tensor]] = {}
        for rank, part in enumerate(parts):
            if branch in part:
                shard = part[branch].view(by_rank[rank][branch])
                rows.setdefault(self.plan.layout.coordinates(rank)["data"], []).append(shard)
        tokens = concat([self._splits[branch].joined(shards, self.predicted) for _, shards in sorted(rows.items())])
        return self.experts.current.prediction(tokens, self.plan.sizes(branch))


def alike(branches: Mapping[int, Inputs], variants: Sequence[Hashable]) -> list[list[int]]:
    """Group branches that may run as one batch: equal shapes, positions (a batch has one table) and variants."""
    groups: list[list[int]] = []
    for i, inputs in branches.items():
        same = [group for group in groups if variants[group[0]] == variants[i]]
        match = next((group for group in same if _run_alike(branches[group[0]], inputs)), None)
        if match is None:
            groups.append([i])
        else:
            match.append(i)
    return groups


def _run_alike(one: Inputs, other: Inputs) -> bool:
    shapes = [{name: (tensor.shape, tensor.dtype) for name, tensor in inputs.items()} for inputs in (one, other)]
    positions = [name for name in one if name.endswith("_ids")]
    return shapes[0] == shapes[1] and all(torch.equal(one[name], other[name]) for name in positions)
