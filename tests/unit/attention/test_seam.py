"""Padding rows that a module adds for a stream without tokens never reach the attention of real tokens."""

import pytest
import torch

from parallel_backend.denoiser.attention_chain import WithoutPadding


@pytest.mark.parametrize(
    ("sizes", "padding"), [((2, 3), []), ((0, 3), [0]), ((3, 0), [3]), ((0, 0), [0, 1]), ((2, 0, 3), [2])]
)
def test_padding_rows_are_removed_and_get_zeros(sizes, padding):
    rows = sum(sizes) + len(padding)
    tokens = [row for row in range(rows) if row not in padding]
    query = torch.arange(1.0, rows + 1).view(1, 1, rows, 1)
    seen: list[list[float]] = []

    def inner(*qkv, **_):
        seen.extend(tensor.flatten().tolist() for tensor in qkv)
        return qkv[0]

    out = WithoutPadding(sizes, inner)(query, query + 10, query + 20, scale=None, sample=None)
    assert seen == [[1 + row + add for row in tokens] for add in (0, 10, 20)]
    assert out.flatten().tolist() == [0 if row in padding else row + 1 for row in range(rows)]
