"""MiniMax-H3's VAE, whose own clips and tiles go to ranks: against diffusers in one process, and the bytes sent."""

from unittest import mock

import pytest
import torch

from lab.verify.vae.run import HALF, TOLERANCE, VaeCase, VaeComparison
from parallel_backend.engine.working_memory import coding_bytes
from parallel_backend.loading import load
from parallel_backend.vaes.minimax_h3 import MiniMaxH3
from tests.ranks import driver
from tests.ranks.test_vaes import NARROW

SMALL = {"own_tile": 64, "own_overlap": 16}
"""Sides in pixels, so that small pictures have several tiles."""


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Let tiles of the reference be as small as those of the ranks."""
    for name, pixels in SMALL.items():
        monkeypatch.setattr(MiniMaxH3, name, pixels)


def with_small_tiles(rank, message, tensors, **options):
    """Handle a request with small tiles."""
    with mock.patch.multiple(MiniMaxH3, own_tile=SMALL["own_tile"], own_overlap=SMALL["own_overlap"]):
        return driver.handle(rank, message, tensors, **options)


def case(folder, ranks, **asked):
    """Return a comparison of a narrow VAE."""
    return VaeComparison(VaeCase(kind="minimax_h3", ranks=ranks, width=NARROW, **asked), folder)


@pytest.mark.parametrize(
    ("ranks", "size", "encode"),
    [
        (2, (12, 9, 8), False),  # two clips of three by three tiles
        (3, (12, 9, 7), False),
        (4, (9, 5, 9), False),  # two clips of two by three tiles; the last frames repeated
        (3, (1, 9, 6), False),
        (3, (2, 4, 4), False),  # one tile: two ranks stay idle
        (2, (7, 5, 7), True),
        (3, (12, 6, 5), True),  # three clips of two by two tiles
        (3, (1, 9, 6), True),
    ],
)
@pytest.mark.daily(3)
def test_tiles_equal_diffusers(pools, tmp_path, ranks, size, encode):
    subject = case(tmp_path, ranks, size=size, encode=encode)
    answers = pools(ranks).run(with_small_tiles, subject.message, subject.given)
    assert [answer["error"] for answer in answers] == [None] * ranks
    got = answers[0]["tensors"]
    assert subject.error(got, subject.wanted()) <= TOLERANCE
    sent = tuple(got["sent_bytes"].tolist())
    assert sent == subject.formula()
    assert len(sent) == (1 if size == (2, 4, 4) else ranks)
    assert sent[0] > 0 or len(sent) == 1


@pytest.mark.parametrize("encode", [False, True], ids=["decode", "encode"])
@pytest.mark.daily(1)
def test_half_precision_is_as_near_to_float32_as_diffusers(pools, tmp_path, encode):
    subject = case(tmp_path, 3, size=(3, 5, 6), encode=encode, dtype="float16")
    got = pools(3).run(with_small_tiles, subject.message, subject.given)[0]["tensors"]
    wanted = subject.wanted()
    assert TOLERANCE < subject.error(got, wanted) <= HALF * subject.own_error(wanted)
    assert tuple(got["sent_bytes"].tolist()) == subject.formula()


@pytest.mark.parametrize("encode", [False, True], ids=["decode", "encode"])
def test_several_samples(pools, tmp_path, encode):
    subject = case(tmp_path, 3, size=(7, 5, 4), encode=encode)
    ((name, sample),) = subject.given.items()
    samples, expected = [sample, sample.flip(-2)], []
    for one in samples:
        subject.given = {name: one}
        expected.append(subject.wanted())
    answer = pools(3).run(with_small_tiles, subject.message, {name: torch.cat(samples)})[0]
    assert subject.error(answer["tensors"], torch.cat(expected)) <= TOLERANCE


def test_progress_counts_tiles_and_a_cancel_stops_between_them(pools, tmp_path):
    subject = case(tmp_path, 2, size=(12, 9, 8))
    answers = pools(2).run(with_small_tiles, subject.message, subject.given)
    decoding = [progress for progress, _ in answers[0]["reports"] if progress.phase == "decoding"]
    assert [(each.value, each.total, each.note) for each in decoding] == [(i, 18, "") for i in range(2, 19, 2)]
    stopped = pools(2).run(with_small_tiles, subject.message, subject.given, cancel_after=3)
    assert {answer["error"] for answer in stopped} == {"Cancelled: decoding was cancelled"}
    assert stopped[0]["reports"][-1][0].value == 6
    after = pools(2).run(with_small_tiles, subject.message, subject.given)
    assert torch.equal(after[0]["tensors"]["pixels"], answers[0]["tensors"]["pixels"])


@pytest.fixture
def limit(pools):
    """``limit(nbytes)`` limits the memory of both ranks until the test is over."""
    yield lambda nbytes: pools(2).run(driver.limit_memory, nbytes)
    pools(2).run(driver.limit_memory, None)


def test_memory_is_that_of_a_tile(pools, tmp_path, limit):
    """A picture of nine tiles needs no more room than one of a tile; without room for a tile it is refused."""
    subject = case(tmp_path, 2, size=(2, 10, 10), encode=True)
    config, weights = subject.checkpoint.config("vae"), load.vae_bytes(subject.checkpoint, torch.float32)
    tile = coding_bytes("AutoencoderKLMiniMaxH3", config, pixels=64**2, frames=17, encode=True, itemsize=4)
    outcomes = []
    for room in (2 * tile, tile // 2):
        limit(weights + room)
        answers = pools(2).run(with_small_tiles, subject.message, subject.given)
        outcomes.append({answer["error"] for answer in answers})
    assert outcomes[0] == {None}
    (refusal,) = outcomes[1]
    assert refusal.startswith("NoRoom: rank 0 (cpu) has room for ")
    other = "use devices with more memory, or load the VAE with ComfyUI's own loader, without Parallel VAE"
    assert refusal.endswith(other)
