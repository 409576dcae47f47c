"""Every exact strategy equals the stock forward."""

import pytest

from tests.ranks import driver
from tests.ranks.requests import Case
from tests.ranks.test_forward import check
from tests.support import tiny

LAYOUTS = [
    (2, "ring=2"),
    (3, "ring=3"),
    (4, "ring=4"),
    (4, "ring=2 ulysses=2"),
    (4, "cfg=2 ring=2"),
    (2, "tensor=2"),
    (3, "tensor=3"),
    (4, "tensor=2 ulysses=2"),
    (4, "tensor=2 ring=2"),
    (4, "cfg=2 tensor=2"),
    (2, "ulysses=2 shard_weights"),
    (3, "ring=3 shard_weights"),
    (4, "ring=2 ulysses=2 shard_weights"),
    (4, "cfg=2 ulysses=2 shard_weights"),
    (4, "tensor=2 ulysses=2 shard_weights"),
    (4, "tensor=2 ring=2 shard_weights"),
    (2, "pipe=2"),
    (4, "pipe=2 ulysses=2"),
    (4, "pipe=2 ring=2"),
    (4, "cfg=2 pipe=2"),
    (4, "data=2 pipe=2"),
    (8, "cfg=2 ring=2 ulysses=2"),
    (8, "tensor=2 ring=2 ulysses=2"),
]


@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS)
@pytest.mark.parametrize("heads", [4, 3])
@pytest.mark.daily(23)
def test_equals_stock(pools, checkpoints, ranks, layout, heads):
    check(pools, checkpoints(heads=heads), tiny.Tiny(heads=heads), ranks, layout, Case())


def test_sharded_weights_equal_stock_where_fsdp_gathers_by_itself(pools, checkpoints):
    pools(2).run(driver.pretend_old_torch, True)
    try:
        path, sizes = checkpoints(heads=3, seed=6), tiny.Tiny(heads=3, seed=6)
        check(pools, path, sizes, 2, "ulysses=2 shard_weights", Case())
    finally:
        pools(2).run(driver.pretend_old_torch, False)
