"""The shapes that benchmarks time."""

import pytest

from lab.bench.ranks.cases import Case
from parallel_backend.errors import InvalidRequest
from parallel_backend.interfaces.geometry import LATENT


def case(family: str, tokens: int, frames: int) -> Case:
    return Case(family=family, tokens=tokens, text_tokens=8, branches=1, frames=frames)


@pytest.mark.parametrize(("frames", "size"), [(0, (1, 48, 60)), (5, (5, 24, 24)), (9, (9, 16, 20))])
def test_frames_share_the_tokens(frames, size):
    assert tuple(case("wan", 720, frames).inputs()[LATENT].shape[2:]) == size


@pytest.mark.parametrize(
    ("family", "frames", "said"),
    [("flux", 2, "fixed"), ("latte", 8, "fixed"), ("wan", -1, "at least"), ("wan", 7, "7")],
)
def test_frames_that_do_not_work_are_refused(family, frames, said):
    with pytest.raises(InvalidRequest, match=said):
        case(family, 720, frames)
