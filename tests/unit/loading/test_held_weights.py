"""A part that is filled from another one has the file's weights, reads only what was not held, and copies little."""

import random
from itertools import pairwise

import pytest
import torch
from torch import nn

from parallel_backend.loading.held_weights import Held, HeldWeights

UNITS = 12


class _Files:
    """Stands for the files: the parameters, and the number of values that have been read."""

    def __init__(self, weights):
        self.weights, self.read_values = weights, 0

    def read(self, name, dim, parts, rows, into):
        assert rows is None
        into.copy_(cut(self.weights[name], dim, parts))
        self.read_values += into.numel()


class _Module(nn.Module):
    def __init__(self, weights):
        super().__init__()
        self.inner = nn.Module()
        for name, weight in weights.items():
            self.inner.register_parameter(name, nn.Parameter(weight, requires_grad=False))


def cut(weight, dim, parts):
    if parts is None:
        return weight
    return torch.cat([weight.narrow(dim, part.start, part.stop - part.start) for part in parts], dim=dim)


def slices(*spans):
    return tuple(slice(start, stop) for start, stop in spans)


def files(dtype=torch.float32):
    numbers = torch.arange(UNITS * 10).reshape(UNITS, 10)
    by_dim = {"inner.rows": numbers, "inner.columns": numbers.T.contiguous(), "inner.bias": numbers[:, 0].clone()}
    return _Files({name: each.to(dtype) for name, each in by_dim.items()})


def cuts(parts):
    return {} if parts is None else {"inner.rows": (0, parts), "inner.columns": (1, parts), "inner.bias": (0, parts)}


def part_of(source, parts, device="cpu"):
    """A part of the model: its rows and columns in these slices."""
    weights = {name: cut(each, *cuts(parts).get(name, (0, None))) for name, each in source.weights.items()}
    return _Module({name.removeprefix("inner."): each.to(device).clone() for name, each in weights.items()})


def fill(source, held, parts):
    """A part that is filled from what is held, and whether its parameters are right."""
    module = part_of(source, parts, "meta")
    filled = held.fill(module, cuts(parts), source)
    for name in filled:
        assert torch.equal(module.get_parameter(name), cut(source.weights[name], *cuts(parts).get(name, (0, None))))
    return module, filled


def held_of(source, parts):
    return HeldWeights.of(part_of(source, parts), cuts(parts))


WHOLE, FIRST, LAST, ODD = None, slices((0, 6)), slices((6, 12)), slices((0, 2), (5, 9))


@pytest.mark.parametrize(
    ("before", "after", "read"),
    [
        (WHOLE, FIRST, 0.0), (WHOLE, LAST, 0.0), (WHOLE, ODD, 0.0), (FIRST, WHOLE, 0.5), (LAST, WHOLE, 0.5),
        (FIRST, slices((4, 9)), 0.6), (ODD, slices((0, 9)), 1 / 3), (ODD, slices((0, 2), (8, 12)), 0.5),
        (slices((5, 9), (0, 2)), ODD, 0.0), (FIRST, slices((0, 3), (3, 6)), 0.0),
    ],
)  # fmt: skip
def test_only_what_is_not_held_is_read(before, after, read):
    source = files()
    module, filled = fill(source, held_of(source, before), after)
    assert filled == source.weights.keys()
    assert source.read_values == pytest.approx(read * sum(each.numel() for each in module.parameters()))


@pytest.mark.parametrize("seed", range(30))
def test_any_chain_of_parts_is_right(seed):
    chance = random.Random(seed)
    source, held = files(), held_of(files(), WHOLE)
    for _ in range(5):
        ends = sorted(chance.sample(range(UNITS + 1), 2 * chance.randint(1, 3)))
        spans = [span for i, span in enumerate(pairwise(ends)) if i % 2 == 0]
        chance.shuffle(spans)
        parts = chance.choice([WHOLE, slices(*spans)])
        module, _ = fill(source, held, parts)
        if chance.random() < 0.5:
            held.free_spare(module)
            assert held.spare == 0
        rest = {name: nn.Parameter(cut(weight, *cuts(parts).get(name, (0, None))), requires_grad=False)
                for name, weight in source.weights.items()}  # fmt: skip
        for name, each in rest.items():
            if module.get_parameter(name).is_meta:  # what nothing is held of, the loader reads
                setattr(module.inner, name.removeprefix("inner."), each)
        held = HeldWeights.of(module, cuts(parts)).joined(held)


@pytest.mark.parametrize(
    ("before", "after", "missing"),
    [
        (WHOLE, WHOLE, 0.0), (WHOLE, FIRST, 0.0), (WHOLE, ODD, 0.5), (FIRST, WHOLE, 0.5), (ODD, FIRST, 0.0),
        (FIRST, LAST, 0.5), (ODD, ODD, 0.0),
    ],
)  # fmt: skip
def test_what_filling_takes_is_known_before(before, after, missing):
    source, held = files(), held_of(files(), before)
    whole = sum(each.nbytes for each in source.weights.values())
    assert held.missing(part_of(source, after, "meta"), cuts(after)) == pytest.approx(missing * whole)


def test_the_way_back_reads_nothing_until_what_is_beyond_is_left():
    source = files()
    held = held_of(source, WHOLE)
    for parts in (FIRST, ODD, LAST, WHOLE):
        module, _ = fill(source, held, parts)
        held = HeldWeights.of(module, cuts(parts)).joined(held)
    assert source.read_values == 0
    module, _ = fill(source, held, FIRST)
    assert held.free_spare(module)
    fill(source, HeldWeights.of(module, cuts(FIRST)).joined(held), WHOLE)
    assert source.read_values == 10 * 6 * 2 + 6


def test_one_stretch_is_no_copy_until_the_rest_is_left():
    source, whole = files(), files()
    parent = part_of(source, WHOLE)
    held = HeldWeights.of(parent, {})
    module, _ = fill(whole, held, LAST)
    storages = {name: each.untyped_storage().data_ptr() for name, each in parent.named_parameters()}
    assert {name: each.untyped_storage().data_ptr() for name, each in module.named_parameters()} == storages
    assert held.spare == sum(each.nbytes for each in module.parameters())
    assert held.free_spare(module)
    assert (held.spare, held.free_spare(module)) == (0, False)
    for name, each in module.named_parameters():
        assert each.untyped_storage().nbytes() == each.nbytes
        assert torch.equal(each, cut(whole.weights[name], *cuts(LAST)[name]))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn])
def test_columns_of_compressed_weights_are_copied(dtype):
    source = files(dtype)
    module, _ = fill(source, held_of(source, WHOLE), LAST)
    assert all(each.is_contiguous() for each in module.parameters())


def test_weights_that_the_part_lacks_stay_beyond_it():
    source = files()
    held = held_of(source, WHOLE)
    module = _Module({"rows": torch.empty(UNITS, 10, device="meta")})
    assert held.fill(module, {}, source) == {"inner.rows"}
    assert held.spare == source.weights["inner.columns"].nbytes + source.weights["inner.bias"].nbytes
    assert held.free_spare(module)
    assert held.spare == 0


def test_zeros_stand_for_nothing():
    source = files()
    held = HeldWeights({"inner.bias": Held(tensor=torch.zeros(UNITS), dim=0, ranges=())})
    module = _Module({"bias": torch.empty(UNITS, device="meta")})
    assert held.fill(module, {}, source) == frozenset()
    held = held_of(source, WHOLE)
    assert held.fill(module, {"inner.bias": (0, ())}, source) == frozenset()
    assert held.fill(module, {}, source) == {"inner.bias"}


def test_other_names_and_cuts_along_another_dim_are_left_to_the_files():
    source = files()
    held = held_of(source, FIRST).without(frozenset({"inner.bias"}))
    module = part_of(source, WHOLE, "meta")
    cut_across = {"inner.rows": (1, FIRST), "inner.columns": (0, FIRST)}
    assert held.fill(module, cut_across, source) == frozenset()


def test_a_copy_without_room_leaves_the_rest_for_later(monkeypatch):
    source = files()
    held = held_of(source, WHOLE)
    module, _ = fill(source, held, FIRST)
    clone, copies = torch.Tensor.clone, list[torch.Tensor]()

    def clone_once(tensor, **options):
        if copies:
            raise torch.OutOfMemoryError
        copies.append(tensor)
        return clone(tensor, **options)

    monkeypatch.setattr(torch.Tensor, "clone", clone_once)
    before = held.spare
    assert held.free_spare(module)
    assert 0 < held.spare < before
    assert not held.free_spare(module)
    monkeypatch.undo()
    assert held.free_spare(module)
    assert held.spare == 0
