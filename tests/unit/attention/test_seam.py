"""Rows that a module makes up for a stream without tokens never reach the attention of others."""

import pytest
import torch

from parallel_backend.denoiser.attention_chain import WithoutPadding


@pytest.mark.parametrize(
    ("sizes", "made_up"), [((2, 3), []), ((0, 3), [0]), ((3, 0), [3]), ((0, 0), [0, 1]), ((2, 0, 3), [2])]
)
def test_made_up_rows_are_left_out_where_they_lie(sizes, made_up):
    rows = sum(sizes) + len(made_up)
    own = [row for row in range(rows) if row not in made_up]
    query = torch.arange(1.0, rows + 1).view(1, 1, rows, 1)
    seen: list[list[float]] = []

    def inner(*qkv, **_):
        seen.extend(tensor.flatten().tolist() for tensor in qkv)
        return qkv[0]

    out = WithoutPadding(sizes, inner)(query, query + 10, query + 20, scale=None, sample=None)
    assert seen == [[1 + row + add for row in own] for add in (0, 10, 20)]
    assert out.flatten().tolist() == [0 if row in made_up else row + 1 for row in range(rows)]
