"""Which layouts belong inside a host."""

import pytest

from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.machines.ranks.crossing import cross_badly

TWO_BY_TWO = ("", "", "b", "b")


@pytest.mark.parametrize(
    ("layout", "hosts", "parts"),
    [
        ("ulysses=4", TWO_BY_TWO, ["ulysses=4"]),
        ("ring=2 ulysses=2", TWO_BY_TWO, []),
        ("cfg=2 tensor=2", TWO_BY_TWO, []),
        ("ring=2 ulysses=2", ("", "b", "b", "b"), ["ulysses=2"]),
        ("ulysses=2 tensor=2", TWO_BY_TWO, ["ulysses=2"]),
        ("ring=2 ulysses=2 shard_weights", TWO_BY_TWO, ["shard_weights"]),
        ("cfg=2 ulysses=2 shard_weights", TWO_BY_TWO, []),
        ("ulysses=2", TWO_BY_TWO, []),  # the ranks of the other host are idle
        ("ulysses=4", (), []),
    ],
)
def test_what_crosses_badly(layout: str, hosts: tuple[str, ...], parts: list[str]) -> None:
    assert cross_badly(ParallelLayout.parse(layout), hosts) == parts
