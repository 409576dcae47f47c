"""Every VAE split by rows against diffusers' decode and encode, at odd heights, and the bytes that the ranks send."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import nn

from lab.verify.vae.kinds import KINDS
from lab.verify.vae.run import HALF, TOLERANCE, VaeCase, VaeComparison
from parallel_backend.attention.kernels import KERNELS
from parallel_backend.autoencoder.chunks import Chunks
from parallel_backend.autoencoder.spatial import RowSplit, layers, watch
from parallel_backend.autoencoder.spatial.norms import MergedNorm
from parallel_backend.autoencoder.tiles import Tiles, TileSpace
from parallel_backend.layout.partition import Partition
from parallel_backend.protocol.model_spec import DType
from parallel_backend.vaes import VAES
from tests.ranks import driver

NARROW = 8
SMALL = {2: (3, 7, 4), 3: (3, 17, 3), 4: (3, 7, 3)}
"""Latent sizes (frames, rows, columns) by the number of ranks; image VAEs take no frames. On two ranks, at 8 pixels per
latent row, rank 0 has enough rows to compute edges separately, and rank 1 has not."""
IMAGE_KINDS = ("image", "flux2")
OWN_TILES = ("minimax_h3",)
"""VAEs whose own tiles the ranks take in turn."""


def ask(pools, folder, asked, *, ranks=None, function=driver.handle, **options):
    """Run a request on the ranks. Returns its subject and the ranks' answers."""
    subject = VaeComparison(asked, folder)
    return subject, pools(ranks or asked.ranks).run(function, subject.message, subject.given, **options)


def check(pools, folder, asked, **options):
    """Compare the result with diffusers', and the bytes sent with the formula. Returns rank 0's answer."""
    subject, answers = ask(pools, folder, asked, **options)
    assert [answer["error"] for answer in answers] == [None] * len(answers)
    got, wanted = answers[0]["tensors"], subject.wanted()
    if asked.dtype == "float32":
        assert subject.error(got, wanted) <= TOLERANCE
    else:
        assert TOLERANCE < subject.error(got, wanted) <= HALF * subject.own_error(wanted)
    assert tuple(got["sent_bytes"].tolist()) == subject.formula()
    return answers[0]


@pytest.mark.parametrize(
    ("ranks", "frames", "encode"), [(2, 8, False), (3, 15, False), (3, 13, True), (4, 16, False), (2, 10, True)]
)
def test_chunks_of_time_equal_one_process(pools, tmp_path, ranks, frames, encode):
    """Each rank has whole chunks. 16 latent frames are four of them, the last of one."""
    case = VaeCase(kind="open_sora1", ranks=ranks, encode=encode, width=NARROW, size=(frames, 5, 3))
    check(pools, tmp_path, case)


def test_few_chunks_are_split_by_rows(pools, tmp_path):
    """Two chunks would leave one of three ranks idle."""
    chunks = Chunks.of(VAES["VideoAutoencoderPipeline"]({}), (1, 4, 10, 5, 3), encode=False)
    assert [chunks.keep_busy(ranks) for ranks in (1, 2, 3, 4)] == [False, True, False, False]
    check(pools, tmp_path, VaeCase(kind="open_sora1", ranks=3, width=NARROW, size=(10, 5, 3)))


@pytest.mark.parametrize(
    ("kind", "ranks", "encode"),
    [
        *((kind, ranks, False) for kind in KINDS for ranks in (2, 3, 4)),
        *((kind, 3, True) for kind in KINDS),
        *((kind, ranks, True) for kind in ("image", "wan22", "cogvideox", "ltx_noisy") for ranks in (2, 4)),
    ],
)
@pytest.mark.daily(13)
def test_rows_equal_diffusers(pools, tmp_path, kind, ranks, encode):
    size = SMALL[ranks][1:] if kind in IMAGE_KINDS else SMALL[ranks]
    check(pools, tmp_path, VaeCase(kind=kind, ranks=ranks, encode=encode, width=NARROW, size=size))


@pytest.mark.parametrize(
    ("kind", "balance", "encode"),
    [
        *((kind, (2.0, 1.0), False) for kind in KINDS),
        *((kind, (1.0, 1.0, 0.5), encode) for kind in ("image", "wan22", "cogvideox") for encode in (False, True)),
        ("image", (1000.0, 1.0, 1.0), False),
    ],
)
@pytest.mark.daily(4)
def test_rows_shared_by_speed_equal_diffusers(pools, tmp_path, kind, balance, encode):
    """Each rank has at least one row, whatever its speed. Tiles of a VAE's own are shared, too."""
    ranks = len(balance)
    size = SMALL[ranks][1:] if kind in IMAGE_KINDS else SMALL[ranks]
    case = VaeCase(kind=kind, ranks=ranks, encode=encode, width=NARROW, size=size, balance=balance)
    even, unequal = (VaeComparison(each, tmp_path).formula() for each in (replace(case, balance=()), case))
    assert even != unequal or kind in OWN_TILES
    check(pools, tmp_path, case)


@pytest.mark.parametrize(("balance", "encode"), [((1.0, 0.5), False), ((0.5, 1.0, 1.0), True), ((0.01, 1.0), False)])
@pytest.mark.daily(2)
def test_own_tiles_shared_by_speed_equal_diffusers(pools, tmp_path, balance, encode):
    """Six tiles. A rank that is far slower takes none."""
    case = VaeCase(
        kind="minimax_h3", ranks=len(balance), encode=encode, width=NARROW, size=(1, 17, 30), balance=balance
    )
    even, unequal = (VaeComparison(each, tmp_path).formula() for each in (replace(case, balance=()), case))
    assert even != unequal
    check(pools, tmp_path, case)


@pytest.mark.parametrize(
    ("kind", "encode"),
    [*((kind, False) for kind in KINDS), *((kind, True) for kind in ("image", "wan22", "cogvideox", "ltx_noisy"))],
)
@pytest.mark.daily(2)
def test_rows_in_half_precision_are_as_near_to_float32_as_diffusers(pools, tmp_path, kind, encode):
    dtype: DType = "float16" if kind == "mochi" else "bfloat16"
    size = (5, 3) if kind in IMAGE_KINDS else (2, 5, 3)
    check(pools, tmp_path, VaeCase(kind=kind, ranks=3, encode=encode, width=NARROW, size=size, dtype=dtype))


def test_a_vae_is_kept_in_the_dtype_that_is_asked_for(pools, tmp_path):
    kept = []
    for dtype in ("float32", "bfloat16", "bfloat16", "float16", "float32"):
        asked = VaeCase(kind="image", ranks=2, width=NARROW, size=(7, 4), dtype=dtype)
        models = check(pools, tmp_path, asked)["models"]
        kept += [(model.loads, model.note) for model in models if model.path.startswith(str(tmp_path))]
    half, other = "the VAE is in bfloat16", "the VAE is in float16"
    assert kept == [(1, ""), (2, half), (2, half), (3, other), (4, "")]


@pytest.mark.parametrize("kind", ["wan21", "cogvideox"])
def test_a_long_video_on_four_ranks(pools, tmp_path, kind):
    check(pools, tmp_path, VaeCase(kind=kind, ranks=4, width=NARROW, size=(13, 30, 2)))


def test_an_even_number_of_latent_frames_that_decodes_to_more_frames_than_are_encoded(pools, tmp_path):
    for encode in (False, True):
        check(pools, tmp_path, VaeCase(kind="cogvideox", ranks=2, width=NARROW, size=(2, 7, 4), encode=encode))


def test_many_rows_whose_edges_are_computed_separately(pools, tmp_path):
    check(pools, tmp_path, VaeCase(kind="image", ranks=2, width=NARROW, size=(75, 3)))
    check(pools, tmp_path, VaeCase(kind="image", ranks=2, width=NARROW, size=(75, 3), encode=True))


def test_ranks_without_rows_stay_idle(pools, tmp_path):
    answer = check(pools, tmp_path, VaeCase(kind="image", ranks=4, width=NARROW, size=(2, 9)))
    assert len(answer["tensors"]["sent_bytes"]) == 2


@pytest.mark.parametrize("encode", [False, True], ids=["decode", "encode"])
@pytest.mark.parametrize(("kind", "size"), [("image", (5, 4)), ("wan21", (2, 5, 4))])
def test_several_samples(pools, tmp_path, kind, size, encode):
    """Also the frames of a video with an image VAE."""
    subject = VaeComparison(VaeCase(kind=kind, ranks=3, width=NARROW, size=size, encode=encode), tmp_path)
    ((name, sample),) = subject.given.items()
    samples, expected = [sample, sample.flip(-2)], []
    for one in samples:
        subject.given = {name: one}
        expected.append(subject.wanted())
    answer = pools(3).run(driver.handle, subject.message, {name: torch.cat(samples)})[0]
    assert subject.error(answer["tensors"], torch.cat(expected)) <= TOLERANCE
    if kind == "image":
        frames = torch.stack(samples, dim=2 if name == "latent" else 1)
        answer = pools(3).run(driver.handle, subject.message, {name: frames})[0]
        assert subject.error(answer["tensors"], torch.stack(expected, dim=1 if name == "latent" else 2)) <= TOLERANCE


@pytest.mark.parametrize(("kind", "size"), [("image", (5, 4)), ("hunyuan_video", (2, 8, 4))])
def test_progress_and_cancelling(pools, tmp_path, kind, size):
    """Also while rows are under way, as with many rows."""
    asked = VaeCase(kind=kind, ranks=2, width=NARROW, size=size)
    _, answers = ask(pools, tmp_path, asked)
    decoding = [progress for progress, _ in answers[0]["reports"] if progress.phase == "decoding"]
    steps = [(progress.value, progress.note) for progress in decoding]
    assert steps == [(i, "") for i in range(1, decoding[0].total + 1)]
    _, stopped = ask(pools, tmp_path, asked, cancel_after=len(decoding) - 3)
    assert {answer["error"] for answer in stopped} == {"Cancelled: decoding was cancelled"}
    _, after = ask(pools, tmp_path, asked)
    assert torch.equal(after[0]["tensors"]["pixels"], answers[0]["tensors"]["pixels"])


def without_silu(rank, message, tensors):
    """Handle a request with a layer that is not in the lists."""
    known, layers.ROW_BY_ROW = layers.ROW_BY_ROW, layers.ROW_BY_ROW - {"SiLU"}
    try:
        return driver.handle(rank, message, tensors)
    finally:
        layers.ROW_BY_ROW = known


def without_interpolation(rank, message, tensors):
    """Handle a request with a function between layers that may combine rows."""
    known = watch.CROSS_ROW_FUNCTIONS[F.interpolate]
    watch.CROSS_ROW_FUNCTIONS[F.interpolate] = watch.always
    try:
        return driver.handle(rank, message, tensors)
    finally:
        watch.CROSS_ROW_FUNCTIONS[F.interpolate] = known


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (without_silu, "encoder.down_blocks.0.resnets.0.nonlinearity is a SiLU, which has no known split by rows"),
        (without_interpolation, "it calls interpolate between its layers, which may read other ranks' rows"),
    ],
)
def test_what_cannot_be_split_is_decoded_by_one_rank_with_a_note(pools, tmp_path, function, reason):
    for rows in (2, 5, 5):  # first only two ranks learn that it cannot be split; last, all know
        asked = VaeCase(kind="image", ranks=3, width=NARROW, size=(rows, 4))
        subject, answers = ask(pools, tmp_path, asked, function=function)
        assert [answer["error"] for answer in answers] == [None] * 3
        assert subject.error(answers[0]["tensors"], subject.wanted()) <= TOLERANCE
        assert len(answers[0]["tensors"]["sent_bytes"]) == 1
        last = [progress for progress, _ in answers[0]["reports"]][-1]
        assert last.note.startswith(f"on one rank: {reason}")
        (loaded,) = [model for model in answers[0]["models"] if model.path == subject.message.model.path]
        assert loaded.note.startswith(f"the VAE works on one rank: {reason}")


def averaging(rank, message, tensors):
    """Handle a request with the ranks' variances averaged, as if all ranks had the same mean."""
    merge = MergedNorm._merge

    def averaged(norm, local):
        mean, _ = merge(norm, local)
        return mean, merge(norm, torch.stack([torch.zeros_like(local[0]), local[1]]))[1]

    with mock.patch.object(MergedNorm, "_merge", averaged):
        return driver.handle(rank, message, tensors)


def test_a_ramp_from_dark_to_bright(pools, tmp_path):
    subject = VaeComparison(VaeCase(kind="image", ranks=3, width=NARROW, size=(17, 5)), tmp_path)
    subject.given["latent"] += torch.linspace(-10, 10, 17).view(-1, 1)
    errors = [
        subject.error(pools(3).run(function, subject.message, subject.given)[0]["tensors"], subject.wanted())
        for function in (driver.handle, averaging)
    ]
    assert errors[0] <= TOLERANCE
    assert errors[1] > 100 * TOLERANCE


def rows_of(rank, latent):
    """Return the rows of one of three ranks."""
    return RowSplit(axis=driver.mesh(rank, "ring=3").axes["ring"], latent=latent)


@torch.no_grad()
def normed(rank, x):
    """Return this rank's rows of a normalised image, on three ranks."""
    partition = Partition.even(50, 3)
    return MergedNorm(nn.GroupNorm(4, x.shape[1]), rows_of(rank, partition))(x.split(partition.sizes, 2)[rank])


def test_statistics_of_a_ramp_far_from_zero(pools):
    """The ramp goes from dark to bright, 100 standard deviations away from 0.

    There, averaged variances are wrong, and variances from sums of squares have lost three digits.
    """
    x = torch.randn(1, 8, 50, 40, generator=torch.Generator().manual_seed(0))
    x = x + torch.linspace(0, 6, 50).view(1, 1, -1, 1)
    x = x + 100 * x.std()
    wanted = F.group_norm(x.double(), 4)
    got = torch.cat(pools(3).run(normed, x), dim=2)
    assert (got - wanted).abs().max() <= TOLERANCE

    half = x.bfloat16()
    wanted = F.group_norm(half.double(), 4)
    got = torch.cat(pools(3).run(normed, half), dim=2)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), wanted, rtol=2**-8, atol=1e-3)
    coarse = half.unflatten(1, (4, 2)).mean((2, 3, 4)).view(4, 1, 1, 1)  # rounded to bfloat16
    assert ((half.unflatten(1, (4, 2)) - coarse) / x.std()).flatten(1, 2).sub(wanted).abs().max() > 0.1

    groups = [rearrange(part, "1 (g c) h w -> g (c h w)", g=4) for part in x.split(Partition.even(50, 3).sizes, 2)]
    counts = torch.tensor([group.shape[1] for group in groups]).view(-1, 1) / (2 * 50 * 40)
    mean = sum(share * group.mean(1) for share, group in zip(counts, groups, strict=True))
    averaged = sum(share * group.var(1, correction=0) for share, group in zip(counts, groups, strict=True))
    squares = sum(share * (group**2).mean(1) for share, group in zip(counts, groups, strict=True)) - mean**2
    for variance, wrong_by in ((averaged, 0.1), (squares, 5 * TOLERANCE)):
        bad = (x.unflatten(1, (4, 2)) - mean.view(4, 1, 1, 1)) / (variance.view(4, 1, 1, 1) + 1e-5).sqrt()
        assert (bad.flatten(1, 2) - wanted).abs().max() > wrong_by


def custom_vae():
    """Return a module of known layers that no VAE class has: down to half the height, and back."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 5, padding=2, padding_mode="replicate"),
        nn.GroupNorm(2, 8, affine=False),
        nn.Sequential(nn.ZeroPad2d((0, 1, 0, 1)), nn.Conv2d(8, 8, 3, stride=2)),
        nn.Conv2d(8, 8, 3, padding=2, dilation=2, padding_mode="reflect"),
        nn.SiLU(),
        nn.Upsample(scale_factor=2.0, mode="nearest"),
        nn.Sequential(nn.ZeroPad2d((1, 1, 1, 1)), nn.Conv2d(8, 3, 5, padding=1)),
    )


@torch.no_grad()
def custom_vae_on_rows(rank, x):
    """Return the output for this rank's rows, and the output for all rows once the split is undone."""
    module, latent = custom_vae(), Partition.even(17, 3)
    with layers.split(module, rows_of(rank, latent), KERNELS["sdpa"]):
        local = module(x.split([2 * size for size in latent.sizes], 2)[rank])
    return local, module(x)


def test_an_unknown_vae_of_known_layers(pools):
    x = torch.randn(2, 3, 34, 9, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        wanted = custom_vae()(x)
    parts, undone = zip(*pools(3).run(custom_vae_on_rows, x), strict=True)
    torch.testing.assert_close(torch.cat(parts, 2), wanted)
    assert all(torch.equal(whole, wanted) for whole in undone)


def blended(subject, tiles):
    """Blend diffusers' results for each tile."""
    ((name, whole_input),) = subject.given.items()
    sides = (TileSpace(dims=(-2, -1), scale=1), TileSpace(dims=(-3, -2), scale=8))
    before, after = sides if name == "latent" else sides[::-1]
    result = torch.zeros(())
    for place in tiles.places:
        subject.given = {name: tiles.crop(whole_input, place, before)}
        tile = subject.wanted()
        part = tiles.zeros(tile, after)
        tiles.crop(part, place, after).add_(tile * tiles.weight(place, after, tile.ndim))
        result = result + part
    subject.given = {name: whole_input}
    return result


@pytest.mark.parametrize("encode", [False, True], ids=["decode", "encode"])
def test_tiles_on_several_ranks(pools, tmp_path, encode):
    """The result is diffusers' for each tile, blended, and does not depend on which rank computes which tile."""
    asked = VaeCase(kind="image", ranks=3, width=NARROW, size=(20, 11), encode=encode)
    subject = VaeComparison(asked, tmp_path)
    tiled = replace(subject.message, tile=64)
    results: list[torch.Tensor] = []
    for ranks in (1, 2, 3):
        devices = replace(subject.devices, indices=tuple(range(ranks)))
        message = replace(tiled, model=replace(tiled.model, devices=devices))
        answers = pools(3).run(driver.handle, message, subject.given)
        assert [answer["error"] for answer in answers] == [None] * 3
        results.append(answers[0]["tensors"][subject.makes])
        reports = [progress for progress, _ in answers[0]["reports"] if progress.phase != "loading"]
        assert (reports[-1].value, reports[-1].total) == (6, 6)
        assert {progress.note for progress in reports} == {"approximate: tiles of 64 pixels"}
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    assert subject.error({subject.makes: results[0]}, blended(subject, Tiles((20, 11), 8))) <= TOLERANCE


def test_tiles_of_several_videos_after_a_cancelled_request(pools, tmp_path):
    subject = VaeComparison(VaeCase(kind="wan21", ranks=2, width=NARROW, size=(2, 17, 4)), tmp_path)
    tiled, latents = replace(subject.message, tile=64), [subject.given["latent"], subject.given["latent"].flip(-2)]
    expected = []
    for latent in latents:
        subject.given = {"latent": latent}
        expected.append(blended(subject, Tiles((17, 4), 8)))
    both = {"latent": torch.cat(latents)}
    stopped = pools(2).run(driver.handle, tiled, both, cancel_after=1)
    assert {answer["error"] for answer in stopped} == {"Cancelled: decoding was cancelled"}
    got = pools(2).run(driver.handle, tiled, both)[0]["tensors"]
    assert subject.error(got, torch.cat(expected)) <= TOLERANCE


def test_one_tile_is_exact_and_bad_sizes_are_refused(pools, tmp_path):
    asked = VaeCase(kind="image", ranks=2, width=NARROW, size=(9, 10))
    subject = VaeComparison(asked, tmp_path)
    whole = pools(2).run(driver.handle, replace(subject.message, tile=80), subject.given)[0]
    assert subject.error(whole["tensors"], subject.wanted()) <= TOLERANCE
    for tile in (56, 100):
        refused = pools(2).run(driver.handle, replace(subject.message, tile=tile), subject.given)
        takes = "this VAE takes tiles of multiples of 8 pixels, at least 64, or 0 for no tiling"
        assert {answer["error"] for answer in refused} == {f"InvalidRequest: tile {tile}: {takes}"}
