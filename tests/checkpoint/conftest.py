"""The shipped pipeline, loaded once through diffusers alone."""

from pathlib import Path

import pytest
from diffusers import WanPipeline

from training import sampling

SHAPES = Path(__file__).resolve().parents[2] / "checkpoints" / "shapes"


@pytest.fixture(scope="session")
def shapes_folder() -> Path:
    return SHAPES


@pytest.fixture(scope="session")
def pipeline() -> WanPipeline:
    return sampling.load(SHAPES)
