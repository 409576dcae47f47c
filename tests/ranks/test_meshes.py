"""Process groups: which ones a layout has, and that all ranks free those of unused layouts in the same way."""

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
    """Records the names of the groups that each kind of communication runs on."""

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
    mesh = driver.engine(rank)._meshes.get(message.model.layout)
    assert mesh is not None
    assert mesh.weights_axis is not None
    assert mesh.weights_axis.group is not None
    assert mesh.sequence.group is not None
    names = {"weights": mesh.weights_axis.group.group_name, "sequence": mesh.sequence.group.group_name}
    return answer["error"], dict(groups.by_kind), names


@pytest.mark.parametrize(("ranks", "layout"), [(2, "ulysses=2 shard_weights"), (4, "cfg=2 ring=2 shard_weights")])
def test_weights_arrive_on_a_group_of_their_own(pools, checkpoints, ranks, layout):
    message, tensors = requests.forward(requests.spec(checkpoints(heads=3), layout), CASE)
    for error, by_kind, names in pools(ranks).run(groups_used, message, tensors):
        assert error is None
        assert names["weights"] != names["sequence"]
        assert {names["weights"], names["sequence"]} <= by_kind["c10d::send"]


def walk(rank, requested, max_meshes, unload=False):
    """Handle requests on a new engine that keeps few meshes.

    Args:
        requested: messages and tensors.
        max_meshes: number of meshes that the engine keeps.
        unload: whether rank 0 loses its model after each request, as if it made room for a VAE.

    Returns:
        For each request: the error, the prediction, the layouts whose meshes are cached, the number of groups added
        since the start, and the number of threads.
    """
    engine = Engine(rank=rank, world_size=dist.get_world_size(), device=torch.device("cpu"))
    groups_before, results = len(_world.pg_names), []
    with mock.patch.object(driver, "_ENGINES", [engine]), mock.patch.object(mesh_cache, "MAX_MESHES", max_meshes):
        for message, tensors in requested:
            answer = driver.handle(rank, message, tensors)
            cached = [str(layout) for layout in engine._meshes._by_layout]
            groups, threads = len(_world.pg_names) - groups_before, len(os.listdir("/proc/self/task"))
            results.append((answer["error"], answer["tensors"].get("0"), cached, groups, threads))
            if unload and rank == 0:
                engine._models.clear()
    for mesh in engine._meshes._by_layout.values():
        if mesh:
            mesh.free()
    assert len(_world.pg_names) == groups_before
    return results


def walked(pools, model_of, layouts, max_meshes):
    """Run ``walk`` on 4 ranks, one request for each layout, and return rank 0's results.

    Checks that all ranks cache the same meshes.
    """
    requested = [requests.forward(requests.spec(model_of(layout), layout), CASE) for layout in layouts]
    by_rank = pools(4).run(walk, requested, max_meshes)
    for step, layout in enumerate(layouts):
        assert [results[step][0] for results in by_rank] == [None] * 4
        assert len({tuple(results[step][2]) for results in by_rank}) == 1
        assert by_rank[0][step][2][-1] == layout
    return by_rank[0]


def test_the_most_recently_used_layouts_are_kept(pools, checkpoints):
    path = checkpoints(heads=4)
    layouts = ["ulysses=2", "ring=3", "cfg=2", "ring=3", "ulysses=4", "ulysses=2", "cfg=2 ulysses=2", "one rank"]
    results = walked(pools, lambda _: path, layouts, 2)
    assert [cached for _, _, cached, *_ in results] == [
        ["ulysses=2"], ["ulysses=2", "ring=3"], ["ring=3", "cfg=2"], ["cfg=2", "ring=3"], ["ring=3", "ulysses=4"],
        ["ulysses=4", "ulysses=2"], ["ulysses=2", "cfg=2 ulysses=2"], ["cfg=2 ulysses=2", "one rank"],
    ]  # fmt: skip
    assert [groups for *_, groups, _ in results] == [2, 4, 4, 4, 4, 4, 5, 3]
    assert results[-1][-1] < results[1][-1], "freeing a group ends its threads"
    wanted = requests.stock_forward(tiny.Tiny(heads=4), CASE.latent, CASE.timestep, CASE.text(0))
    assert all(requests.relative_error(got, wanted) < 1e-5 for _, got, *_ in results)


def test_a_mesh_that_a_loaded_model_uses_is_kept_by_idle_ranks_too(pools, checkpoints):
    """``tensor=2`` leaves ranks 2 and 3 idle, which have no model."""
    cut, whole = checkpoints(heads=3), checkpoints(heads=4)
    layouts = ["tensor=2", "ring=3", "cfg=2", "ulysses=4", "tensor=2"]
    results = walked(pools, lambda layout: cut if "tensor" in layout else whole, layouts, 2)
    assert [cached for _, _, cached, *_ in results] == [
        ["tensor=2"], ["tensor=2", "ring=3"], ["tensor=2", "cfg=2"], ["tensor=2", "ulysses=4"],
        ["ulysses=4", "tensor=2"],
    ]  # fmt: skip
    torch.testing.assert_close(results[-1][1], results[0][1], rtol=0, atol=0)


@pytest.mark.parametrize(
    "layouts", [("ulysses=2 shard_weights", "ring=2 shard_weights"), ("tensor=2", "tensor=2 ulysses=2")]
)
def test_a_rank_that_lost_its_part_loads_it_together_with_the_others(pools, checkpoints, layouts):
    path = checkpoints(heads=4)
    requested = [requests.forward(requests.spec(path, layout), CASE) for layout in layouts * 2]
    by_rank = pools(4).run(walk, requested, 8, True)
    assert all(error is None for results in by_rank for error, *_ in results)
    wanted = requests.stock_forward(tiny.Tiny(heads=4), CASE.latent, CASE.timestep, CASE.text(0))
    assert all(requests.relative_error(got, wanted) < 1e-5 for _, got, *_ in by_rank[0])


@pytest.mark.parametrize("cut", [("tensor=2 ring=2", "tensor=2 ulysses=2"), ("tensor=2 ulysses=2", "cfg=2 tensor=2")])
def test_a_rank_that_kept_its_part_loads_it_together_with_the_others(pools, checkpoints, cut):
    """``ring=3`` leaves rank 3 idle: its part stays on the groups of a mesh that the other ranks have stopped using."""
    path = checkpoints(heads=4)
    two = Case(batch=1, texts=(9, 4))
    requested = [requests.forward(requests.spec(path, layout), two) for layout in (cut[0], "ring=3", cut[1])]
    by_rank = pools(4).run(walk, requested, 8)
    assert all(error is None for results in by_rank for error, *_ in results)
    wanted = requests.stock_forward(tiny.Tiny(heads=4), two.latent, two.timestep, two.text(0))
    assert all(requests.relative_error(got, wanted) < 1e-5 for _, got, *_ in by_rank[0])


def test_the_mesh_is_freed_once_the_model_is_unloaded(pools, checkpoints):
    path = checkpoints(heads=3)
    tensor = requests.spec(path, "tensor=2")
    first, *rest = [requests.forward(requests.spec(path, text), CASE) for text in ("tensor=2", "ring=3", "cfg=2")]
    by_rank = pools(4).run(walk, [first, (Unload(model=tensor), {}), *rest], 2)
    assert [results[-1][2] for results in by_rank] == [["ring=3", "cfg=2"]] * 4
