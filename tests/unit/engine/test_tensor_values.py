"""Indices in a request's tensors are inside the tables that they are for."""

import pytest
import torch

from parallel_backend.engine.tensor_values import Tables, first_outside

TABLES = Tables(rows={"text_labels": 3}, levels={"mask_labels": "mask_levels"})


def request(**changed):
    tensors = {
        "0.text_labels": torch.tensor([[0, 2]]),
        "0.mask_labels": torch.tensor([[0, 1]]),
        "0.mask_levels": torch.tensor([[0.5, 1.0]]),
        "1.mask_labels": torch.tensor([[3, 1]]),
        "1.mask_levels": torch.tensor([[0.1, 0.2, 0.5, 1.0]]),
    }
    return tensors | {f"{name[1]}.{name[3:]}": torch.tensor([value]) for name, value in changed.items()}


def sentence(tensors):
    sizes = TABLES.sizes({name: tuple(tensor.shape) for name, tensor in tensors.items()})
    index, value = first_outside(tensors, sizes)
    return TABLES.refusal([*tensors][index], value, sizes) if index >= 0 else None


def test_each_branch_has_its_own_levels():
    assert sentence(request()) is None


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"_0_mask_labels": [0, 2]}, "0.mask_labels holds 2, and 0.mask_levels knows 0 to 1"),
        ({"_1_mask_labels": [-1, 0]}, "1.mask_labels holds -1, and 1.mask_levels knows 0 to 3"),
        ({"_0_text_labels": [0, 3]}, "0.text_labels holds 3, and this model knows 0 to 2"),
    ],
)
def test_an_index_outside_is_named(changed, words):
    assert sentence(request(**changed)) == words


def test_an_unused_branch_without_levels_has_no_table():
    tensors = request()
    del tensors["1.mask_levels"]
    assert sentence(tensors) is None
