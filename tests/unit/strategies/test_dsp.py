"""What DSP sends, and which models it takes."""

from dataclasses import replace

import pytest

from parallel_backend.denoiser.plan import DenoisingPlan
from parallel_backend.errors import InvalidRequest
from parallel_backend.families.registry import FAMILIES, family_of
from parallel_backend.interfaces.geometry import LATENT, TIMESTEP
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.strategies.dsp import Dsp
from parallel_backend.strategies.ulysses import Ulysses


def plan(class_name, layout, *, frames=16, side=32, batch=1, branches=2):
    """A request to a model of a family's published proportions."""
    family = family_of(class_name)
    variant = next(iter(family.variants().values()))
    config = {**variant.config, "video_length": frames}
    shapes = {LATENT: (batch, 4, frames, side, side), TIMESTEP: (batch,), "encoder_hidden_states": (batch, 7, 32)}
    return DenoisingPlan(
        layout=ParallelLayout.parse(layout),
        geometry=family.describe(config),
        samples=(shapes[LATENT][0],) * branches,
        latents=({LATENT: shapes[LATENT][1:]},) * branches,
        extents=(family.extent(config, shapes),) * branches,
        alike=("same",) * branches,
        skipped=(frozenset(),) * branches,
        adapters=((),) * branches,
        guided=False,
    )


def sent(strategy, axis, ranks, **options):
    """Bytes that all ranks send around attention."""
    wanted = plan("LatteTransformer3DModel", f"{axis}={ranks}", **options)
    return sum(strategy.bytes_sent(wanted.layout, wanted.workload(), rank) for rank in range(ranks))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_it_sends_half_of_what_ulysses_sends(ranks):
    assert sent(Dsp(), "dsp", ranks) * 2 == sent(Ulysses(), "ulysses", ranks)


@pytest.mark.parametrize(("ranks", "frames", "side"), [(3, 16, 18), (3, 5, 26), (4, 7, 10)])
def test_so_it_does_nearly_where_nothing_divides(ranks, frames, side):
    ratio = sent(Dsp(), "dsp", ranks, frames=frames, side=side) / sent(
        Ulysses(), "ulysses", ranks, frames=frames, side=side
    )
    assert 0.48 < ratio < 0.52


def test_models_whose_tokens_attend_to_all_frames_are_refused():
    latte = plan("LatteTransformer3DModel", "dsp=2")
    Dsp().check(latte.layout, latte.workload())
    wan = family_of("WanTransformer3DModel")
    geometry = wan.describe(next(iter(wan.variants().values())).config)
    with pytest.raises(InvalidRequest, match="attend to all frames"):
        Dsp().check(latte.layout, replace(latte, geometry=geometry).workload())


def test_the_table_of_families_says_which_these_are():
    for class_name, row in FAMILIES.items():
        family = family_of(class_name)
        for variant in family.variants().values():
            geometry = family.describe(variant.config)
            assert geometry.within_frames == row.within_frames
