"""Ranks with stand-in GPUs, which live for the session."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

from tests.ranks.stand_in.first_variants import FIRSTS
from tests.support.pool import Pool
from tests.support.stand_in import ranks
from tests.support.stand_in.agreement import faults
from tests.support.stand_in.ranks import Answer
from tests.support.stand_in.requests import RANKS, Request, Small

Check = Callable[[Request], Sequence[Answer]]


@pytest.fixture(scope="session")
def gpus() -> Iterator[Pool]:
    """A pool of ranks, each with a stand-in GPU and an engine on it."""
    pool = Pool(RANKS)
    yield pool
    pool.close()


@pytest.fixture
def check(gpus: Pool) -> Check:
    """``check(request)`` runs a request, finds nothing that GPUs would refuse, and returns the ranks' answers."""

    def run(request: Request) -> Sequence[Answer]:
        answers: list[Answer] = gpus.run(ranks.handle, *request)
        assert {answer.refusal for answer in answers} == {""}
        # The stages of a pipeline are at different places of the latent, and have a group for each direction.
        in_one_order = getattr(request[0].model.layout, "pipe", 1) == 1
        assert faults([answer.notes for answer in answers], in_one_order=in_one_order) == []
        results = answers[0].tensors
        assert results
        assert all(bool(torch.isfinite(each).all()) for each in results.values())
        assert answers[0].notes.operators
        return answers

    return run


@pytest.fixture
def small(folders: Callable[[str, str], Path]) -> Callable[[str], Small]:
    """``small("flux")`` is the small model of a family's first variant."""

    def model(family: str) -> Small:
        class_name, variant = FIRSTS[family]
        return Small(class_name=class_name, variant=variant, path=folders(class_name, variant))

    return model
