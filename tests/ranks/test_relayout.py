"""A model goes from layout to layout; each gives what diffusers gives, and what the ranks hold is not read again."""

import math
from dataclasses import replace

import pytest

from parallel_backend.protocol.messages import Unload
from tests.ranks import driver, requests
from tests.ranks.requests import Case
from tests.ranks.test_room import limit
from tests.ranks.test_weight_changes import check, loras
from tests.support import tiny
from tests.support.weight_changes import write_overlay

__all__ = ["limit", "loras"]

CHAIN = [
    "ulysses=3", "tensor=3", "ring=3", "tensor=2", "tensor=3", "pipe=2 patches=1", "tensor=2 balance=2:1",
    "pipe=2 patches=1 balance=2:1", "ring=3 shard_weights", "tensor=3", "cfg=2",
]  # fmt: skip


def test_each_layout_after_each_other_gives_the_same(pools, checkpoints, loras, tmp_path):
    path, model = checkpoints(heads=3, seed=8), tiny.transformer(sizes := tiny.Tiny(heads=3, seed=8))
    overlay, replaced = write_overlay(tmp_path, model, [name for name in model.state_dict() if "blocks.1" in name])
    for number, layout in enumerate(CHAIN):
        by_branch = (loras[: number % 3], loras[: (number + 1) % 3])
        change, merged = (overlay, replaced) if number % 3 else (None, None)
        check(pools, path, 3, layout, by_branch, change, merged, sizes=sizes)


def test_compiled_blocks_keep_nothing_that_only_another_layout_needs(pools, checkpoints, compiled_eagerly):
    compiled_eagerly(3)
    path, sizes = checkpoints(heads=3, seed=11), tiny.Tiny(heads=3, seed=11)
    check(pools, path, 3, "ulysses=3", ((), ()), sizes=sizes)
    check(pools, path, 3, "tensor=3", ((), ()), sizes=sizes)
    kept = pools(3).run(driver.bytes_held_of, str(path))
    message, tensors = requests.forward(replace(requests.spec(path, "tensor=3"), compile="blocks"), Case())
    pools(3).run(driver.handle, message, tensors)
    after = pools(3).run(driver.bytes_held_of, str(path))
    assert all(now < 0.6 * before for now, before in zip(after, kept, strict=True))


def test_the_way_back_reads_nothing_unless_a_rank_has_rested(pools, checkpoints):
    path = checkpoints(heads=3, seed=9)
    sizes, read = tiny.Tiny(heads=3, seed=9), []
    for rests in (False, True):
        for layout in ("ulysses=3", "tensor=3", "ulysses=3"):
            before = pools(3).run(driver.values_read)
            check(pools, path, 3, layout, ((), ()), sizes=sizes)
            read.append([after - first for after, first in zip(pools(3).run(driver.values_read), before, strict=True)])
            if rests:
                pools(3).run(driver.rest)
    whole, there, back, again, there_again, back_again = read
    values = sum(each.numel() for each in tiny.transformer(sizes).parameters())
    assert whole == [values] * 3
    assert there == back == again == there_again == [0] * 3
    assert all(values / 5 < number < values for number in back_again)


def test_weights_that_only_another_layout_needs_make_room(pools, checkpoints, limit):
    path, sizes = checkpoints(heads=3, seed=10), tiny.Tiny(heads=3, seed=10)
    check(pools, path, 3, "ulysses=3", ((), ()), sizes=sizes)
    (whole,) = set(pools(3).run(driver.bytes_held_of, str(path)))
    check(pools, path, 3, "tensor=3", ((), ()), sizes=sizes)
    assert pools(3).run(driver.bytes_held_of, str(path)) == pytest.approx([whole] * 3, rel=0.1)
    pools(3).run(driver.rest)
    cut = pools(3).run(driver.bytes_held_of, str(path))
    assert all(number < 0.6 * whole for number in cut)
    check(pools, path, 3, "ulysses=3", ((), ()), sizes=sizes)
    limit(math.ceil(1.1 * whole), 3)
    before = pools(3).run(driver.values_read)
    check(pools, path, 3, "tensor=3", ((), ()), sizes=sizes)
    assert pools(3).run(driver.bytes_held_of, str(path)) == cut
    assert pools(3).run(driver.values_read) == before


def test_room_that_clients_ask_for_is_made_of_weights_of_other_layouts(pools, checkpoints):
    path, sizes = checkpoints(heads=3, seed=12), tiny.Tiny(heads=3, seed=12)
    for layout in ("ulysses=3", "tensor=3"):
        check(pools, path, 3, layout, ((), ()), sizes=sizes)
    kept = pools(3).run(driver.bytes_held_of, str(path))
    pools(3).run(driver.handle, Unload(model=requests.spec(path, "tensor=3"), only_cache=True), {})
    after = pools(3).run(driver.bytes_held_of, str(path))
    assert all(now < 0.6 * before for now, before in zip(after, kept, strict=True))
