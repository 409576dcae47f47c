"""MiniMax-H3's video VAE: its clips, its tiles and their blending, against diffusers' own."""

import pytest
import torch

from lab.verify.vae import kinds, stock
from parallel_backend.autoencoder import codec
from parallel_backend.errors import Cancelled, InvalidRequest
from parallel_backend.protocol.messages import Decode, Encode
from parallel_backend.protocol.tensors import describe
from parallel_backend.vaes import VAES
from parallel_backend.vaes.minimax_h3 import MiniMaxH3
from parallel_backend.vaes.own_tiles import Mosaic, Spans, fade
from tests.unit.autoencoder import vae_examples
from tests.unit.autoencoder.test_vaes import ignore
from tests.unit.conftest import one_rank

TILE, OVERLAP = 64, 16
PLANE = (9, 6)
"""Rows and columns of a latent of three by two small tiles."""


@pytest.fixture(autouse=True)
def without_gradients():
    """Run without autograd, as the engine does."""
    with torch.inference_mode():
        yield


@pytest.fixture
def small_tiles(monkeypatch):
    """Let tiles be small, as the tests' pictures are."""
    monkeypatch.setattr(MiniMaxH3, "own_tile", TILE)
    monkeypatch.setattr(MiniMaxH3, "own_overlap", OVERLAP)


def build(kind="minimax_h3"):
    """Return our VAE, its module, and diffusers' own with the same weights."""
    module, theirs = vae_examples.build(kind), vae_examples.build(kind)
    vae = VAES["AutoencoderKLMiniMaxH3"](dict(module.config))
    vae.prepare(module)
    return vae, module, stock.stock(theirs, vae)


def random(*shape):
    """Return random numbers, always the same."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("frames", [1, 2, 3, 6, 7, 9, 12])
@pytest.mark.daily(3)
def test_decode_equals_diffusers_in_several_clips_and_tiles(small_tiles, frames):
    vae, module, theirs = build()
    latent, progress = random(2, 24, frames, *PLANE), []
    pixels = codec.decode(vae, module, latent, lambda *each: progress.append(each))
    expected = (stock.decode(theirs, latent).movedim(1, -1) / 2 + 0.5).clamp(0, 1)
    assert pixels.shape == expected.shape
    assert expected.std() > 0.1
    torch.testing.assert_close(pixels, expected, atol=1e-6, rtol=0)
    clips = {9: 2, 12: 2}.get(frames, 1)
    assert progress == [(i, 2 * clips * 6) for i in range(1, 2 * clips * 6 + 1)]


@pytest.mark.parametrize("frames", [1, 2, 5, 17, 18, 22, 39])
@pytest.mark.daily(3)
def test_encode_equals_diffusers_in_several_clips_and_tiles(small_tiles, frames):
    vae, module, theirs = build()
    pixels, progress = random(1, frames, 80, 112, 3).sigmoid(), []
    latent = codec.encode(vae, module, pixels, lambda *each: progress.append(each))
    expected = stock.encode(theirs, pixels.movedim(-1, 1) * 2 - 1)
    assert latent.shape == expected.shape == (1, 24, vae.latent_frames(frames), 5, 7)
    assert expected.std() > 0.1
    torch.testing.assert_close(latent, expected, atol=1e-5, rtol=0)
    parts = -(-frames // 17) * 2 * 2
    assert progress == [(i, parts) for i in range(1, parts + 1)]


def test_tiles_and_clips_are_part_of_the_result(small_tiles, monkeypatch):
    """Random weights are strong enough that other tiles, or a clip without its neighbour's frames, show."""
    vae, module, _ = build()
    latent = random(1, 24, 12, *PLANE)
    pixels = codec.decode(vae, module, latent, ignore)
    monkeypatch.setattr(MiniMaxH3, "own_overlap", 32)
    assert (codec.decode(vae, module, latent, ignore) - pixels).abs().max() > 0.01
    monkeypatch.setattr(MiniMaxH3, "own_overlap", OVERLAP)
    alone = codec.decode(vae, module, latent[:, :, :7], ignore)
    torch.testing.assert_close(alone[:, :17], pixels[:, :17], atol=1e-6, rtol=0)
    assert (alone[:, 17:] - pixels[:, 17:22]).abs().max() > 0.01


@pytest.mark.parametrize("tile", [64, 256])
def test_tiles_lie_where_diffusers_have_them(tile):
    _, _, theirs = build()
    for length in range(16, 1600, 16):
        ours = Spans.over(length, tile=tile, overlap=tile // 4, step=16)
        starts, lengths, overlaps = theirs._split_tiles(length, tile, tile // 4)
        assert (list(ours.starts), [ours.length] * len(starts), list(ours.overlaps)) == (starts, lengths, overlaps)
        assert ours.total == length


def test_tiles_are_blended_in_diffusers_order():
    """In each dim, three tiles overlap in one place."""
    _, _, theirs = build()
    rows, columns = (Spans.over(length, tile=8, overlap=2, step=1) for length in (15, 16))
    assert rows.starts[2] < rows.starts[0] + 8
    tiles = [[random(1, 2, 3, 8, 8) * (i + 2 * j + 1) for j in range(3)] for i in range(3)]
    expected = theirs._stitch_tiles(tiles, list(rows.overlaps), list(columns.overlaps))
    mosaic = Mosaic(rows, columns)
    for _ in range(2):  # it joins one plane after the other
        joined = [mosaic.add(tile.clone()) for row in tiles for tile in row]
        assert joined[:-1] == [None] * 8
        torch.testing.assert_close(joined[-1], expected, atol=1e-6, rtol=0)


def test_fading_keeps_what_is_the_same():
    whole = torch.full((1, 6), 3.0)
    fade(whole, whole, 1)
    torch.testing.assert_close(whole, torch.full((1, 6), 3.0))


def test_frames_of_latents_and_pixels():
    vae = VAES["AutoencoderKLMiniMaxH3"]({})
    assert [vae.pixel_frames(frames) for frames in (1, 2, 3, 5, 6, 7, 12, 37)] == [1, 5, 9, 17, 18, 22, 39, 124]
    assert [vae.latent_frames(frames) for frames in (1, 2, 5, 17, 18, 22, 39, 124)] == [1, 2, 2, 2, 7, 7, 12, 37]
    assert vae.scale.spatial == 16
    assert vae.colors == 3


def test_a_cancel_stops_between_tiles(small_tiles):
    vae, module, _ = build()
    done = []

    def cancel(*each):
        done.append(each)
        if len(done) == 4:
            raise Cancelled("enough")

    with pytest.raises(Cancelled):
        codec.decode(vae, module, random(1, 24, 7, *PLANE), cancel)
    assert done[-1] == (4, 6)


def test_attention_gives_zeros_instead_of_numbers_that_are_none():
    vae, module, theirs = build()
    latent = random(1, 24, 2, 2, 2)
    for each in (module, theirs):
        each.decoder.transformer_blocks[0].attn.to_v.bias[3] = torch.nan
    assert not torch.isfinite(stock.decode(theirs, latent)).all()
    assert torch.isfinite(codec.decode(vae, module, latent, ignore)).all()


def metas(name, *shape):
    """Return a request's header."""
    return describe({name: torch.zeros(shape)})


@pytest.mark.parametrize(
    ("name", "shape", "tile", "message"),
    [
        ("latent", (1, 24, 2, 3, 3), 512, "tile 512: this VAE works in tiles of its own, of 256 pixels, .* to 0"),
        ("pixels", (1, 5, 16, 64, 3), 0, "pixels of 16 x 64 are too small for this VAE: .* at least 32"),
        ("latent", (1, 32, 2, 3, 3), 0, "has 32 channels and this VAE takes 24"),
    ],
)
def test_what_does_not_fit_is_refused(name, shape, tile, message):
    with pytest.raises(InvalidRequest, match=message):
        codec.check_request(metas(name, *shape), VAES["AutoencoderKLMiniMaxH3"]({}), name=name, tile=tile)


def test_through_the_engine(ask, tmp_path):
    folder = kinds.write(tmp_path, vae_examples.build("minimax_h3"))
    pixels = ask(Decode(model=one_rank(folder)), {"latent": random(1, 24, 3, 2, 3)})["pixels"]
    assert pixels.shape == (1, 9, 32, 48, 3)
    assert ask(Encode(model=one_rank(folder)), {"pixels": pixels})["latent"].shape == (1, 24, 2, 2, 3)
