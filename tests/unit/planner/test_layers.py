"""Work that is counted on the meta device: it is that of the layers, and divides as the tokens do."""

import pytest
import torch

from parallel_backend.families.registry import FAMILIES, family_of
from parallel_backend.interfaces.input_shapes import input_shapes
from parallel_backend.planner.layers import Layers
from parallel_backend.planner.work import Product, Work, count


def layers(class_name: str, batch: int = 1) -> Layers:
    family = family_of(class_name)
    variant = next(iter(family.variants().values()))
    config = family.complete(variant.config)
    shapes = input_shapes(family, config, variant.inputs, batch=batch, size=variant.size, text=variant.text)
    return Layers(class_name, variant.config, shapes, torch.bfloat16)


@pytest.mark.parametrize("class_name", FAMILIES)
def test_every_family_is_counted(class_name):
    counted = layers(class_name)
    work = counted.work(counted.lengths)
    assert work.blocks.operations > 0
    assert work.blocks.kernels > len(counted.family.blocks)


def test_a_linear_layer_is_one_product():
    layer = torch.nn.Linear(6, 5, device="meta", dtype=torch.bfloat16)
    work, result = count(lambda: layer(torch.empty(2, 7, 6, device="meta", dtype=torch.bfloat16)), rows=2, widths=(6,))
    assert result.shape == (2, 7, 5)
    assert dict(work.products) == {Product(rows=14, inner=6, columns=5): 1}
    assert work.operations == 2 * 14 * 6 * 5


def test_a_layer_for_each_sample_is_not_cut():
    layer = torch.nn.Linear(6, 8, device="meta", dtype=torch.bfloat16)
    work, _ = count(lambda: layer(torch.empty(2, 6, device="meta", dtype=torch.bfloat16)), rows=2, widths=(6,))
    assert work.cut(1 / 2).operations == work.operations
    work, _ = count(lambda: layer(torch.empty(3, 6, device="meta", dtype=torch.bfloat16)), rows=2, widths=(6,))
    assert work.cut(1 / 2).operations == work.operations / 2


def test_attention_is_taken_as_a_whole():
    q, k = torch.empty(1, 4, 9, 16, device="meta"), torch.empty(1, 4, 5, 16, device="meta")
    work, out = count(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, k), rows=1, widths=())
    assert out.shape == q.shape
    assert work.operations == 4 * 4 * 9 * 5 * 16
    assert work.moved == work.moved_cut == 0.0


def test_views_move_nothing_and_sums_move_their_tensors():
    x = torch.empty(4, 8, device="meta")
    assert count(lambda: x.view(8, 4).t().unsqueeze(0), rows=1, widths=(8,))[0] == Work()
    assert count(lambda: x + x, rows=1, widths=(8,))[0].moved == 3 * x.nbytes
    assert count(lambda: x + x, rows=1, widths=())[0].moved_cut == 3 * x.nbytes


def test_half_of_the_tokens_is_about_half_of_the_work():
    counted = layers("WanTransformer3DModel")
    whole = counted.work(counted.lengths).blocks
    tokens = {name: -(-length // 2) for name, length in counted.lengths.items()}
    half = counted.work(tokens).blocks
    share = tokens["image"] / counted.lengths["image"]
    fixed = sum(each.operations * n for each, n in whole.products.items() if each.rows <= 9)
    assert half.operations - fixed == pytest.approx(share * (whole.operations - fixed), rel=0.05)


def test_a_batch_of_two_is_twice_the_work_of_tokens():
    one, two = layers("FluxTransformer2DModel"), layers("FluxTransformer2DModel", batch=2)
    assert two.work(two.lengths).blocks.operations == 2 * one.work(one.lengths).blocks.operations


def test_work_adds_up():
    work = Work(products={Product(rows=2, inner=3, columns=4): 1}, moved=1.0, kernels=2)
    assert (work + work) == work.times(2)
