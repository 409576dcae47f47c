"""Prompts of a soak: the seed repeats them, families can run them, and a wrong result is not right."""

import random
from pathlib import Path
from typing import cast

import pytest
import torch

from lab.soak.prompts import Prompts
from parallel_backend.client.client import Client
from parallel_backend.client.exchange import Timeouts
from parallel_backend.protocol.endpoint import Endpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("soak")


def drawn(folder, seed, count=8):
    prompts = Prompts(folder, random.Random(seed), 3)
    return [str(prompts.next()) for _ in range(count)]


def test_the_seed_repeats_the_prompts(folder):
    assert drawn(folder, 1) == drawn(folder, 1)
    assert drawn(folder, 1) != drawn(folder, 2)


class Alone:
    """A client whose one rank answers with fixed samples."""

    endpoint, timeouts = Endpoint(folder=Path("/nowhere")), Timeouts()

    def __init__(self, samples):
        self.samples = samples

    def attempt(self, message, tensors, **options):
        assert len(message.model.devices.indices) == message.model.layout.ranks == 1
        return {"samples": self.samples}


def test_results_are_compared_with_those_of_one_rank(folder):
    prompts = Prompts(folder, random.Random(1), 3)
    prompt = next(each for each in iter(prompts.next, None) if each.loop.exact)
    wanted = torch.linspace(-2, 2, 50)
    prompts.prepare(cast(Client, Alone(wanted)), prompt)
    assert prompts.is_right(prompt, wanted + 1e-3)
    assert not prompts.is_right(prompt, wanted + 1e-2)
    assert not prompts.is_right(prompt, torch.full_like(wanted, torch.nan))
