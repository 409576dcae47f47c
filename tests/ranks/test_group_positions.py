"""Groups that do not begin at rank 0, and groups of every second rank, occur in parity tests of all that uses groups.

A rank that is taken for its position in the group is right only where the group begins at rank 0 and has no gaps.
"""

from dataclasses import replace

import pytest
import torch

from lab.engine.unclamped import Unclamped
from lab.verify.forward.matrix import WITHIN_FRAMES
from lab.verify.vae.kinds import KINDS
from lab.verify.vae.run import TOLERANCE, VaeCase, VaeComparison
from parallel_backend.autoencoder.tiles import Tiles
from parallel_backend.distributed.mesh import _ranks_of
from parallel_backend.engine.autoencoding import Autoencoding
from parallel_backend.engine.request import ActiveRequest
from parallel_backend.layout.parallel_layout import AXES, ParallelLayout
from parallel_backend.protocol.tensors import describe
from tests.ranks import driver, test_exact, test_forward, test_step_loops
from tests.ranks.test_vaes import IMAGE_KINDS, NARROW, blended

LATER, STRIDED = "cfg=2 ring=2", "ring=2 ulysses=2"
"""Layouts in which the groups of ``ring`` are ranks 0 and 1, 2 and 3, and ranks 0 and 2, 1 and 3."""
TILED = (20, 11)


def positions(layouts):
    """Names of axes whose groups begin after rank 0 without gaps, and of those with gaps."""
    later, strided = set[str](), set[str]()
    for layout in layouts:
        for name, groups in _ranks_of(ParallelLayout.parse(layout)).items():
            for first, *rest in (ranks for ranks in groups if len(ranks) > 1):
                gaps = rest[0] > first + 1
                strided |= {name} if gaps else set()
                later |= {name} if first and not gaps else set()
    return later, strided


def test_parity_tests_have_all_axes_in_both_positions():
    """The outermost axis always has gaps, unless it begins at rank 0, and the innermost never has.

    Nothing is inside ``dsp``, which is not combined with ``tensor``.
    """
    exact = [layout for _, layout in (*test_exact.LAYOUTS, *test_forward.LAYOUTS)] + list(WITHIN_FRAMES)
    later, strided = positions(exact)
    assert later == {*AXES, "sequence", "weights", "even boundaries", "odd boundaries", "return"} - {"data"}
    assert strided == {*AXES, "sequence", "weights", "even boundaries", "odd boundaries", "return"} - {"dsp", "tensor"}
    later, strided = positions(test_step_loops.COMBINATIONS)
    assert {"pipe", "return", "ring", "behind"} <= later
    assert {"pipe", "return", "ring", "behind"} <= strided


def on_ring(rank, layout, message, given):
    """Carry out a request of a VAE in each group of ``ring`` by itself, as if it were all ranks.

    Args:
        given: the tensors for the first group, and for the second.
    """
    mesh = driver.mesh(rank, layout)
    ring = mesh.axes["ring"]
    alone = replace(mesh, all_ranks=replace(ring, tag=mesh.all_ranks.tag))
    tensors = given[ring.ranks[0] > 0]
    request = ActiveRequest(
        message=message,
        metas=describe(tensors),
        tensors=None if ring.index else tensors,
        received=() if ring.index else tuple(tensors),
        report=lambda *_: None,
        cancelled=lambda: False,
    )
    components = driver.engine(rank)._components(message.model)
    with torch.inference_mode(), Unclamped():
        return Autoencoding(request, components, bfloat16=True)._run_on(alone, torch.device("cpu"))


def check(pools, subject, layout, message, wanted):
    """Compare what both groups make of different tensors with what ``wanted`` returns for each."""
    ((name, first),) = subject.given.items()
    given = [{name: first}, {name: first.flip(-2)}]
    answers = pools(4).run(on_ring, layout, message, given)
    groups = _ranks_of(ParallelLayout.parse(layout))["ring"]
    for tensors, (root, other) in zip(given, groups, strict=True):
        subject.given = tensors
        assert subject.error(answers[root], wanted()) <= TOLERANCE
        assert answers[other] == {}


@pytest.mark.parametrize(
    ("kind", "layout", "encode"),
    [
        *((kind, STRIDED, False) for kind in KINDS),
        *((kind, LATER, False) for kind in ("image", "wan21", "ltx_noisy")),
        *((kind, STRIDED, True) for kind in ("image", "wan22", "cogvideox", "ltx_noisy")),
        *((kind, LATER, True) for kind in ("image", "wan21")),
    ],
)
@pytest.mark.daily(4)
def test_rows_of_a_vae_equal_diffusers(pools, tmp_path, kind, layout, encode):
    size = (7, 4) if kind in IMAGE_KINDS else (3, 7, 4)
    subject = VaeComparison(VaeCase(kind=kind, ranks=2, encode=encode, width=NARROW, size=size), tmp_path)
    check(pools, subject, layout, subject.message, subject.wanted)


@pytest.mark.parametrize("layout", [LATER, STRIDED])
@pytest.mark.parametrize("encode", [False, True], ids=["decode", "encode"])
def test_tiles_of_a_vae_equal_diffusers(pools, tmp_path, layout, encode):
    subject = VaeComparison(VaeCase(kind="image", ranks=2, width=NARROW, size=TILED, encode=encode), tmp_path)
    message = replace(subject.message, tile=64)
    check(pools, subject, layout, message, lambda: blended(subject, Tiles(TILED, 8)))
