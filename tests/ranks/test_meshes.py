"""Process groups: which ones a layout has, and that those of layouts no longer used are freed, on all ranks alike."""

import os
from collections import defaultdict
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_backend.distributed import mesh_cache
from parallel_backend.engine.engine import Engine
from parallel_backend.protocol.messages import Unload
from tests.ranks import driver, requests
from tests.ranks.requests import Case
from tests.support import tiny

CASE = Case(batch=1)


class Groups(TorchDispatchMode):
    """The groups that each kind of communication runs on, by name."""

    def __init__(self):
        super().__init__()
        self.by_kind = defaultdict(set)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            boxed = [arg for arg in args if isinstance(arg, torch.ScriptObject)]
            groups = [dist.ProcessGroup.unbox(arg) for arg in boxed if "ProcessGroup" in str(arg._type())]
            self.by_kind[func._schema.name].update(group.group_name for group in groups)
        return func(*args, **(kwargs or {}))


def groups_used(rank, message, tensors):
    with Groups() as groups:
        answer = driver.handle(rank, message, tensors)
    made = driver.engine(rank)._meshes.get(message.model.layout)
    assert made is not None
    assert made.weights is not None
    assert made.weights.group is not None
    assert made.sequence.group is not None
    names = {"weights": made.weights.group.group_name, "sequence": made.sequence.group.group_name}
    return answer["error"], dict(groups.by_kind), names


@pytest.mark.parametrize(("ranks", "layout"), [(2, "ulysses=2 shard_weights"), (4, "cfg=2 ring=2 shard_weights")])
def test_weights_arrive_on_a_group_of_their_own(pools, checkpoints, ranks, layout):
    message, tensors = requests.forward(requests.spec(checkpoints(heads=3), layout), CASE)
    for error, by_kind, names in pools(ranks).run(groups_used, message, tensors):
        assert error is None
        assert names["weights"] != names["sequence"]
        assert by_kind["c10d::_allgather_base_"] == {names["weights"]}
        assert names["sequence"] in by_kind["c10d::send"]
        assert names["weights"] not in by_kind["c10d::send"]


def walk(rank, requested, most, loses=False):
    """Carry requests out on a new engine that keeps few meshes; by request what came of it, the layouts whose meshes
    are there, how many groups more than before there are, and how many threads. ``loses``: rank 0 has no model left
    after each, as when it made room for a VAE.
    """
    engine = Engine(rank=rank, world_size=dist.get_world_size(), device=torch.device("cpu"))
    before, seen = len(_world.pg_names), []
    with mock.patch.object(driver, "_ENGINES", [engine]), mock.patch.object(mesh_cache, "MOST", most):
        for message, tensors in requested:
            answer = driver.handle(rank, message, tensors)
            kept = [str(layout) for layout in engine._meshes._made]
            groups, threads = len(_world.pg_names) - before, len(os.listdir("/proc/self/task"))
            seen.append((answer["error"], answer["tensors"].get("0"), kept, groups, threads))
            if loses and rank == 0:
                engine._models.clear()
    for made in engine._meshes._made.values():
        if made:
            made.free()
    assert len(_world.pg_names) == before
    return seen


def walked(pools, model_of, layouts, most):
    """``walk`` on 4 ranks, one request a layout: all keep the same meshes. What rank 0 saw."""
    requested = [requests.forward(requests.spec(model_of(layout), layout), CASE) for layout in layouts]
    by_rank = pools(4).run(walk, requested, most)
    for step, layout in enumerate(layouts):
        assert [seen[step][0] for seen in by_rank] == [None] * 4
        assert len({tuple(seen[step][2]) for seen in by_rank}) == 1
        assert by_rank[0][step][2][-1] == layout
    return by_rank[0]


def test_the_layouts_used_last_are_kept(pools, checkpoints):
    path = checkpoints(heads=4)
    layouts = ["ulysses=2", "ring=3", "cfg=2", "ring=3", "ulysses=4", "ulysses=2", "cfg=2 ulysses=2", "one rank"]
    seen = walked(pools, lambda _: path, layouts, 2)
    assert [kept for _, _, kept, *_ in seen] == [
        ["ulysses=2"], ["ulysses=2", "ring=3"], ["ring=3", "cfg=2"], ["cfg=2", "ring=3"], ["ring=3", "ulysses=4"],
        ["ulysses=4", "ulysses=2"], ["ulysses=2", "cfg=2 ulysses=2"], ["cfg=2 ulysses=2", "one rank"],
    ]  # fmt: skip
    assert [groups for *_, groups, _ in seen] == [2, 4, 4, 4, 4, 4, 5, 3]
    assert seen[-1][-1] < seen[1][-1], "threads of a group that is freed end"
    wanted = requests.stock_forward(tiny.Tiny(heads=4), CASE.latent, CASE.timestep, CASE.text(0))
    assert all(requests.relative_error(got, wanted) < 1e-5 for _, got, *_ in seen)


def test_a_mesh_that_a_loaded_model_uses_is_kept_by_idle_ranks_too(pools, checkpoints):
    """``tensor=2`` leaves ranks 2 and 3 idle, which have no model."""
    cut, whole = checkpoints(heads=3), checkpoints(heads=4)
    layouts = ["tensor=2", "ring=3", "cfg=2", "ulysses=4", "tensor=2"]
    seen = walked(pools, lambda layout: cut if "tensor" in layout else whole, layouts, 2)
    assert [kept for _, _, kept, *_ in seen] == [
        ["tensor=2"], ["tensor=2", "ring=3"], ["tensor=2", "cfg=2"], ["tensor=2", "ulysses=4"],
        ["ulysses=4", "tensor=2"],
    ]  # fmt: skip
    torch.testing.assert_close(seen[-1][1], seen[0][1], rtol=0, atol=0)


@pytest.mark.parametrize(
    "layouts", [("ulysses=2 shard_weights", "ring=2 shard_weights"), ("tensor=2", "tensor=2 ulysses=2")]
)
def test_a_rank_that_lost_its_part_loads_it_together_with_the_others(pools, checkpoints, layouts):
    path = checkpoints(heads=4)
    requested = [requests.forward(requests.spec(path, layout), CASE) for layout in layouts * 2]
    by_rank = pools(4).run(walk, requested, 8, True)
    assert all(error is None for seen in by_rank for error, *_ in seen)
    wanted = requests.stock_forward(tiny.Tiny(heads=4), CASE.latent, CASE.timestep, CASE.text(0))
    assert all(requests.relative_error(got, wanted) < 1e-5 for _, got, *_ in by_rank[0])


@pytest.mark.parametrize("cut", [("tensor=2 ring=2", "tensor=2 ulysses=2"), ("tensor=2 ulysses=2", "cfg=2 tensor=2")])
def test_a_rank_that_kept_its_part_loads_it_together_with_the_others(pools, checkpoints, cut):
    """``ring=3`` leaves rank 3 idle, whose part stays on the groups of a mesh that the others no longer use."""
    path = checkpoints(heads=4)
    two = Case(batch=1, texts=(9, 4))
    requested = [requests.forward(requests.spec(path, layout), two) for layout in (cut[0], "ring=3", cut[1])]
    by_rank = pools(4).run(walk, requested, 8)
    assert all(error is None for seen in by_rank for error, *_ in seen)
    wanted = requests.stock_forward(tiny.Tiny(heads=4), two.latent, two.timestep, two.text(0))
    assert all(requests.relative_error(got, wanted) < 1e-5 for _, got, *_ in by_rank[0])


def test_it_goes_once_the_model_is_unloaded(pools, checkpoints):
    path = checkpoints(heads=3)
    tensor = requests.spec(path, "tensor=2")
    first, *rest = [requests.forward(requests.spec(path, text), CASE) for text in ("tensor=2", "ring=3", "cfg=2")]
    by_rank = pools(4).run(walk, [first, (Unload(model=tensor), {}), *rest], 2)
    assert [seen[-1][2] for seen in by_rank] == [["ring=3", "cfg=2"]] * 4
