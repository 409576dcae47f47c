"""Every family in every layout, and every VAE, on stand-in GPUs: what CUDA and NCCL would refuse, or hang in."""

from pathlib import Path

import pytest
import torch

from parallel_backend.verify.forward import examples, matrix
from parallel_backend.verify.vae import kinds
from parallel_backend.verify.vae.kinds import KINDS
from tests.support.pool import Pool
from tests.support.stand_in import ranks
from tests.support.stand_in.agreement import faults
from tests.support.stand_in.requests import CODING, FEW, LAYOUTS, RANKS, Small

FIRSTS = {examples.short_name(name): (name, kind) for name, kind in examples.variants()
          if matrix.is_first_variant(name, kind)}  # fmt: skip
NARROW = 8


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """Ranks with stand-in GPUs."""
    started = Pool(RANKS)
    started.run(ranks.start, str(tmp_path_factory.mktemp("group")))
    yield started
    started.close()


@pytest.fixture
def small(folders):
    """``small("flux")`` is the small model of a family's first variant."""
    return lambda family: Small(class_name=FIRSTS[family][0], variant=FIRSTS[family][1], path=folders(*FIRSTS[family]))


@pytest.fixture(scope="module")
def vae(tmp_path_factory):
    """``vae("wan21")`` is the folder of a small VAE."""
    written: dict[str, Path] = {}

    def folder(kind):
        if kind not in written:
            written[kind] = kinds.write(tmp_path_factory.mktemp("vae") / kind, KINDS[kind].module(NARROW))
        return written[kind]

    return folder


def check(pool, request):
    """Run a request; there are no faults, and the result is finite."""
    answers = pool.run(ranks.handle, *request)
    assert {answer.refusal for answer in answers} == {""}
    assert faults([answer.notes for answer in answers]) == []
    results = answers[0].tensors.values()
    assert results
    assert all(bool(torch.isfinite(each).all()) for each in results)
    assert answers[0].notes.operators
    return answers


@pytest.mark.parametrize("family", FIRSTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_family_in_every_layout(pool, small, layout, family):
    check(pool, small(family).loop(layout))
    check(pool, small(family).forward(layout))


@pytest.mark.parametrize("family", FIRSTS)
@pytest.mark.parametrize(("layout", "text"), FEW)
def test_ranks_without_tokens(pool, small, layout, text, family):
    check(pool, small(family).forward(layout, text=text))


@pytest.mark.parametrize("task", CODING)
@pytest.mark.parametrize("kind", KINDS)
def test_every_vae_split_and_tiled(pool, vae, kind, task):
    check(pool, CODING[task](vae(kind), ranks=3, frames=2, rows=11, columns=3))
    check(pool, CODING[task](vae(kind), ranks=3, frames=1, rows=17, columns=8, tile=8))
