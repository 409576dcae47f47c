"""Pipeline stages hold only their own blocks, and the cut minimises the time of the slowest stage."""

import itertools

import pytest
import torch

from lab.verify.forward import matrix
from lab.verify.loops import run
from parallel_backend.distributed.rank_speeds import grouped
from parallel_backend.families.modules import module_class_of
from parallel_backend.families.registry import family_of
from parallel_backend.loading import partial
from parallel_backend.strategies import stage_cut
from parallel_backend.verify import examples


def empty(class_name, config):
    return family_of(class_name)(partial.empty(module_class_of(class_name), config, torch.float32))


def size(modules):
    parameters = {parameter for module in modules for parameter in module.parameters()}
    return sum(parameter.numel() for parameter in parameters)


@pytest.mark.parametrize("pair", [pair for pair in examples.variants() if matrix.is_first_variant(*pair)])
def test_a_stage_holds_its_blocks_and_what_embed_and_head_need(pair):
    class_name, name = pair
    config = run.config(class_name, name)
    whole = empty(class_name, config)
    blocks = [block.modules for block in whole.blocks if block.modules]
    outside_blocks = size([whole.module]) - size(itertools.chain(*blocks)) + size(whole.shared)
    cut = stage_cut.blocks(whole, (1.0, 1.0, 1.0))
    sites = stage_cut.sites(whole, (1.0, 1.0, 1.0))
    assert cut.total == len(blocks) == whole.geometry.layers
    assert [sum(counts) for counts in zip(*sites, strict=True)] == [site.count for site in whole.geometry.sites]
    for stage in range(3):
        local = empty(class_name, config)
        local.keep_blocks(cut.slice(stage))
        shared = size(local.shared) if cut.offsets[stage] == 0 else 0
        held = size(itertools.chain(*blocks[cut.slice(stage)]))
        assert size([local.module]) == outside_blocks + held - shared


@pytest.mark.parametrize(
    ("costs", "speeds", "wanted"),
    [
        ([1, 1, 1, 1, 1, 1], [1, 1], (3, 3)),
        ([1, 1, 1, 1, 1, 1], [2, 1], (4, 2)),
        ([1, 1, 1, 1, 1, 1], [1, 1, 1, 1], (2, 2, 1, 1)),
        ([4, 1, 1, 1, 1], [1, 1], (1, 4)),
        ([1, 1], [1, 100], (1, 1)),
    ],
)
def test_cut(costs, speeds, wanted):
    assert sorted(stage_cut.cut(costs, speeds).sizes) == sorted(wanted)
    slowest = max(cost(costs, part) / speed for part, speed in parts(stage_cut.cut(costs, speeds).sizes, speeds))
    all_cuts = [
        max(cost(costs, part) / speed for part, speed in parts(sizes, speeds))
        for sizes in itertools.product(range(1, len(costs) + 1), repeat=len(speeds))
        if sum(sizes) == len(costs)
    ]
    assert slowest == min(all_cuts)


def parts(sizes, speeds):
    begin = 0
    for count, speed in zip(sizes, speeds, strict=True):
        yield range(begin, begin + count), speed
        begin += count


def cost(costs, part):
    return sum(costs[i] for i in part)


def test_speeds_that_differ_little_are_made_equal():
    assert grouped([10.0, 9.0, 9.5], 1.25) == (1.0, 1.0, 1.0)
    assert grouped([5.0, 10.0, 9.0], 1.25) == (0.5, 1.0, 1.0)
