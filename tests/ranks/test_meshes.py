"""Process groups: which ones a layout has, and that all ranks free those of unused layouts in the same way."""

import gc
import os
import resource
from collections import defaultdict
from contextlib import contextmanager
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_backend.distributed.groups import _SPARE_DESCRIPTORS, GroupPool
from parallel_backend.distributed.mesh_cache import MeshCache
from parallel_backend.engine.engine import Engine
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.messages import Unload
from tests.ranks import driver, requests
from tests.ranks.requests import Case
from tests.support import tiny

CASE = Case(batch=1)
TWO = Case(batch=1, texts=(9, 4))
TIMEOUT = timedelta(seconds=30)


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


@contextmanager
def without_gc():
    """What is freed in here is freed by its references alone."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def walk(rank, requested, room, unload=False):
    """Handle requests on a new engine.

    Args:
        requested: messages and tensors.
        room: number of groups that each rank has room for.
        unload: whether rank 0 loses its model after each request, as if it made room for a VAE.

    Returns:
        For each request: the error, the prediction, the layouts whose meshes are cached, the number of groups added
        since the start, and the number of threads.
    """
    engine = Engine(rank=rank, world_size=dist.get_world_size(), device=torch.device("cpu"))
    groups_before, results = len(_world.pg_names), []
    affordable = mock.patch.object(GroupPool, "affordable", return_value=room)
    with without_gc(), affordable, mock.patch.object(driver, "_ENGINES", [engine]):
        for message, tensors in requested:
            answer = driver.handle(rank, message, tensors)
            cached = [str(layout) for layout in engine._meshes._by_layout]
            groups, threads = len(_world.pg_names) - groups_before, len(os.listdir("/proc/self/task"))
            results.append((answer["error"], answer["tensors"].get("0"), cached, groups, threads))
            if unload and rank == 0:
                engine._models.clear()
    for layout in list(engine._meshes._by_layout):
        engine._meshes._free(layout)
    assert len(_world.pg_names) == groups_before
    return results


def walked(pools, model_of, layouts, room):
    """Run ``walk`` on 4 ranks, one request for each layout, and return rank 0's results.

    Checks that all ranks cache the same meshes.
    """
    requested = [requests.forward(requests.spec(model_of(layout), layout), TWO) for layout in layouts]
    by_rank = pools(4).run(walk, requested, room)
    for step, layout in enumerate(layouts):
        assert [results[step][0] for results in by_rank] == [None] * 4
        assert len({tuple(results[step][2]) for results in by_rank}) == 1
        assert by_rank[0][step][2][-1] == layout
    return by_rank[0]


def test_the_most_recently_used_layouts_are_kept_as_far_as_there_is_room(pools, checkpoints):
    """``cfg=2`` has the group of ``ulysses=2``, and ``ulysses=4`` the one of all ranks, so both need no room."""
    path, grid = checkpoints(heads=4), "cfg=2 ulysses=2"
    layouts = ["ulysses=2", "ring=3", "cfg=2", grid, "ulysses=4", "ring=3", "one rank"]
    results = walked(pools, lambda _: path, layouts, 2)
    assert [cached for _, _, cached, *_ in results] == [
        ["ulysses=2"], ["ulysses=2", "ring=3"], ["ulysses=2", "ring=3", "cfg=2"], ["cfg=2", grid],
        ["cfg=2", grid, "ulysses=4"], ["ulysses=4", "ring=3"], ["ulysses=4", "ring=3", "one rank"],
    ]  # fmt: skip
    assert [groups for *_, groups, _ in results] == [1, 2, 2, 2, 2, 1, 1]
    assert results[-1][-1] < results[1][-1], "freeing a group ends its threads"
    wanted = requests.stock_forward(tiny.Tiny(heads=4), TWO.latent, TWO.timestep, TWO.text(0))
    assert all(requests.relative_error(got, wanted) < 1e-5 for _, got, *_ in results)


def test_all_meshes_are_kept_where_there_is_room(pools, checkpoints):
    path = checkpoints(heads=4)
    layouts = [
        "ulysses=2", "ring=3", "cfg=2 ulysses=2", "cfg=2 ring=2", "ring=2 ulysses=2", "data=2", "cfg=2", "ring=2",
        "ulysses=3", "ulysses=4", "ring=4", "one rank",
    ]  # fmt: skip
    results = walked(pools, lambda _: path, layouts, 1000)
    assert results[-1][2] == layouts
    assert results[-1][3] == 3, "rank 0 is in the groups of ranks 0 and 1, 0 and 2, and 0 to 2"


def test_a_mesh_that_a_loaded_model_uses_is_kept_by_idle_ranks_too(pools, checkpoints):
    """``tensor=2`` leaves ranks 2 and 3 idle, which have no model."""
    cut, whole, grid = checkpoints(heads=3), checkpoints(heads=4), "cfg=2 ulysses=2"
    layouts = ["tensor=2", "ring=3", grid, "ring=3", "tensor=2"]
    results = walked(pools, lambda layout: cut if "tensor" in layout else whole, layouts, 2)
    assert [cached for _, _, cached, *_ in results] == [
        ["tensor=2"], ["tensor=2", "ring=3"], ["tensor=2", grid], ["tensor=2", "ring=3"], ["ring=3", "tensor=2"],
    ]  # fmt: skip
    torch.testing.assert_close(results[-1][1], results[0][1], rtol=0, atol=0)


@pytest.mark.parametrize(
    "layouts", [("ulysses=2 shard_weights", "ring=2 shard_weights"), ("tensor=2", "tensor=2 ulysses=2")]
)
def test_a_rank_that_lost_its_part_loads_it_together_with_the_others(pools, checkpoints, layouts):
    path = checkpoints(heads=4)
    requested = [requests.forward(requests.spec(path, layout), CASE) for layout in layouts * 2]
    by_rank = pools(4).run(walk, requested, 1000, True)
    assert all(error is None for results in by_rank for error, *_ in results)
    wanted = requests.stock_forward(tiny.Tiny(heads=4), CASE.latent, CASE.timestep, CASE.text(0))
    assert all(requests.relative_error(got, wanted) < 1e-5 for _, got, *_ in by_rank[0])


@pytest.mark.parametrize("cut", [("tensor=2 ring=2", "tensor=2 ulysses=2"), ("tensor=2 ulysses=2", "cfg=2 tensor=2")])
def test_a_rank_that_kept_its_part_loads_it_together_with_the_others(pools, checkpoints, cut):
    """``ring=3`` leaves rank 3 idle: its part stays on the groups of a mesh that the other ranks have stopped using."""
    path = checkpoints(heads=4)
    requested = [requests.forward(requests.spec(path, layout), TWO) for layout in (cut[0], "ring=3", cut[1])]
    by_rank = pools(4).run(walk, requested, 1000)
    assert all(error is None for results in by_rank for error, *_ in results)
    wanted = requests.stock_forward(tiny.Tiny(heads=4), TWO.latent, TWO.timestep, TWO.text(0))
    assert all(requests.relative_error(got, wanted) < 1e-5 for _, got, *_ in by_rank[0])


def test_the_mesh_is_freed_once_the_model_is_unloaded(pools, checkpoints):
    grid, tensor = "cfg=2 ulysses=2", requests.spec(checkpoints(heads=3), "tensor=2")
    first = requests.forward(tensor, TWO)
    rest = [requests.forward(requests.spec(checkpoints(heads=4), text), TWO) for text in ("ring=3", grid)]
    kept, freed = [first, *rest], [first, (Unload(model=tensor), {}), *rest]
    assert [results[-1][2] for results in pools(4).run(walk, kept, 2)] == [["tensor=2", grid]] * 4
    assert [results[-1][2] for results in pools(4).run(walk, freed, 2)] == [[grid]] * 4


def limited(rank, layouts, more):
    """Make meshes on a new cache, while rank 1 may open only so many descriptors ``more``.

    Returns:
        For each layout: the layouts whose meshes are cached, and what was sent or received for it.
    """
    gc.collect()  # what an earlier test has left would be closed while descriptors are counted
    cache = MeshCache(rank, dist.get_world_size(), torch.device("cpu"), timeout=TIMEOUT, in_use=list)
    before, results = resource.getrlimit(resource.RLIMIT_NOFILE), []
    if rank == 1:
        least = len(os.listdir("/proc/self/fd")) + more
        resource.setrlimit(resource.RLIMIT_NOFILE, (least * _SPARE_DESCRIPTORS // (_SPARE_DESCRIPTORS - 1), before[1]))
    try:
        for layout in layouts:
            with Groups() as groups:
                cache.get(ParallelLayout.parse(layout))
            results.append(([str(each) for each in cache._by_layout], sorted(groups.by_kind)))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for layout in list(cache._by_layout):
            cache._free(layout)
    return results


def test_descriptors_of_one_rank_limit_the_meshes_of_all(pools):
    """Each of these groups takes 5 or 6 descriptors on ranks 0 and 1."""
    layouts = ["ulysses=2", "ring=3", "ulysses=2 shard_weights", "cfg=2", "ring=2"]
    by_rank = pools(4).run(limited, layouts, 12)
    assert by_rank == by_rank[:1] * 4
    asks = ["c10d::allgather_"]
    assert by_rank[0] == [
        (["ulysses=2"], asks),
        (["ulysses=2", "ring=3"], asks),
        (["ulysses=2 shard_weights"], asks),
        (["ulysses=2 shard_weights", "cfg=2"], []),
        (["ulysses=2 shard_weights", "cfg=2", "ring=2"], []),
    ]


def shared(rank, layouts):
    """For each layout: which axes have which group, by the group's name; None on idle ranks."""
    cache = MeshCache(rank, dist.get_world_size(), torch.device("cpu"), timeout=TIMEOUT, in_use=list)
    results = []
    for layout in layouts:
        mesh = cache.get(ParallelLayout.parse(layout))
        axes = [*mesh.axes.values(), mesh.sequence, mesh.all_ranks, *(mesh.pipe_links or ())] if mesh else []
        axes += [axis for axis in (mesh.weights_axis, mesh.ring_async) if axis] if mesh else []
        by_name = {axis.name: axis.group.group_name for axis in axes if axis.group}
        assert all(dist.get_process_group_ranks(axis.group) == list(axis.ranks) for axis in axes if axis.group)
        results.append(by_name)
    for layout in list(cache._by_layout):
        cache._free(layout)
    world = dist.group.WORLD
    assert world is not None
    return results, world.group_name


def test_axes_of_one_mesh_and_of_others_share_groups(pools):
    layouts = ["ring=2 ulysses=2", "cfg=2 ulysses=2", "ulysses=4 shard_weights", "ring=2 stale=previous", "pipe=2"]
    for rank, (results, world) in enumerate(pools(4).run(shared, layouts)):
        grid, other, sharded, stale, stages = results
        assert grid["sequence"] == grid["whole"] == other["whole"] == sharded["ulysses"] == world
        assert grid["ring"] == other["cfg"]
        assert grid["ulysses"] == other["ulysses"]
        assert sharded["weights"] != world
        assert len({grid["ring"], grid["ulysses"], world}) == 3
        if rank > 1:
            assert not stale
            continue
        assert stale["ring"] == stale["whole"] == stages["whole"] == grid["ulysses"]
        assert len({stale["ring"], stale["behind"]}) == 2
        assert len({stages["whole"], stages["even boundaries"], stages["return"]}) == 3
        assert stages["pipe"] == stages["odd boundaries"] == stages["even boundaries"]
