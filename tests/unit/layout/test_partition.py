"""Partitions cover all items, whether or not their number is divisible by that of ranks."""

import pytest

from parallel_backend.layout.partition import Partition


@pytest.mark.parametrize("total", [0, 1, 3, 7, 30, 1001])
@pytest.mark.parametrize("parts", [1, 2, 3, 4, 7])
def test_even_covers_everything_and_differs_by_one_at_most(total, parts):
    partition = Partition.even(total, parts)
    assert partition.total == total
    assert max(partition.sizes) - min(partition.sizes) <= 1
    items = [i for shard in range(parts) for i in range(total)[partition.slice(shard)]]
    assert items == list(range(total))


def test_weighted_follows_the_weights():
    assert Partition.weighted(30, [1, 1, 2]).sizes == (8, 7, 15)
    assert Partition.weighted(10, [0, 1]).sizes == (0, 10)
    assert Partition.weighted(7, [1.0, 1.0]) == Partition.even(7, 2)


@pytest.mark.parametrize("weights", [[], [0, 0], [1, -1]])
def test_invalid_weights(weights):
    with pytest.raises(ValueError, match="non-negative"):
        Partition.weighted(4, weights)


@pytest.mark.parametrize("sizes", [(), (1, -1)])
def test_invalid_sizes(sizes):
    with pytest.raises(ValueError, match="at least one shard"):
        Partition(sizes)


def test_each_shard_has_at_least_so_many():
    assert Partition.weighted(5, [1000, 1, 1], least=1).sizes == (3, 1, 1)
    assert Partition.weighted(3, [1000, 1, 1], least=1).sizes == (1, 1, 1)
    with pytest.raises(ValueError, match="2 items are too few for 3 shards of at least 1"):
        Partition.weighted(2, [1, 1, 1], least=1)
