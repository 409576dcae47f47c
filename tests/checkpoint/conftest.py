"""The shipped pipeline, loaded once with diffusers alone."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from diffusers import WanPipeline

from training import sampling

SHAPES = Path(__file__).resolve().parents[2] / "checkpoints" / "shapes"


@pytest.fixture(scope="session")
def shapes_folder() -> Path:
    return SHAPES


@pytest.fixture(scope="session")
def pipeline() -> Iterator[WanPipeline]:
    """The pipeline, computing on all cores, since no ranks run at the same time."""
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    yield sampling.load(SHAPES)
    torch.set_num_threads(before)
