"""The engine on one rank: text, VAE, unloading, what it says of itself."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from parallel_backend.checkpoint.opening import open_checkpoint
from parallel_backend.engine import autoencoding
from parallel_backend.errors import Cancelled, InvalidRequest
from parallel_backend.protocol.messages import Decode, Encode, EncodeText, Progress, Unload
from tests.support import tiny
from tests.unit.conftest import one_rank

IDS = torch.tensor([[3, 4, 5, 1, 0, 0], [6, 1, 7, 7, 7, 7]])
LENGTHS = torch.tensor([4, 2])


def test_text_equals_transformers_and_is_zero_beyond_its_length(ask, checkpoint):
    embeds = ask(EncodeText(model=one_rank(checkpoint)), {"ids": IDS, "lengths": LENGTHS})["embeds"]
    encoder = tiny.text_encoder(tiny.Tiny())
    for row, length in enumerate(LENGTHS.tolist()):
        with torch.no_grad():
            wanted = encoder(input_ids=IDS[row : row + 1, :length]).last_hidden_state[0]
        torch.testing.assert_close(embeds[row, :length], wanted)
        assert not embeds[row, length:].any()


@pytest.mark.parametrize(
    ("ids", "lengths", "words"),
    [
        (IDS + 90, LENGTHS, "vocabulary of 15"),
        (IDS, LENGTHS + 5, "not all in 1 .. 6"),
        (IDS, LENGTHS - 2, "not all in 1 .. 6"),
        (IDS[0], LENGTHS, "ids [N, L]"),
        (IDS.float(), LENGTHS, "int64"),
    ],
)
def test_text_that_does_not_fit(ask, checkpoint, ids, lengths, words):
    with pytest.raises(InvalidRequest, match=words.replace("[", r"\[").replace(".", r"\.")):
        ask(EncodeText(model=one_rank(checkpoint)), {"ids": ids, "lengths": lengths})


@pytest.fixture
def every_part(monkeypatch):
    """Let ranks ask after each part whether to go on: small models are done before they would."""
    monkeypatch.setattr(autoencoding, "INTERVAL", 0.0)


@pytest.mark.parametrize("size", [(1, 4, 4), (3, 3, 5)])
def test_decode_equals_diffusers(ask, checkpoint, every_part, size):
    latent = 3.0 * torch.randn(2, 16, *size)
    reports = []
    message = Decode(model=one_rank(checkpoint))
    pixels = ask(message, {"latent": latent}, report=lambda progress, _: reports.append(progress))["pixels"]
    with torch.no_grad():
        wanted = tiny.vae(tiny.Tiny()).decode(latent).sample
    torch.testing.assert_close(pixels, ((wanted + 1) / 2).permute(0, 2, 3, 4, 1), atol=1e-6, rtol=0)
    steps = [Progress(phase="decoding", value=i + 1, total=2 * size[0]) for i in range(2 * size[0])]
    assert reports == [*(Progress(phase="loading", value=value, total=1) for value in (0, 1)), *steps]


@pytest.mark.parametrize(("frames", "latents"), [(1, 1), (5, 2), (6, 2), (8, 2), (9, 3)])
def test_encode_equals_diffusers_and_leaves_out_what_fills_no_latent_frame(ask, checkpoint, frames, latents):
    pixels = torch.rand(2, frames, 16, 24, 3)
    latent = ask(Encode(model=one_rank(checkpoint)), {"pixels": pixels})["latent"]
    used = pixels[:, : 1 + 4 * (latents - 1)].permute(0, 4, 1, 2, 3) * 2 - 1
    with torch.no_grad():
        wanted = tiny.vae(tiny.Tiny()).encode(used).latent_dist.mode()
    assert latent.shape == (2, 16, latents, 2, 3)
    torch.testing.assert_close(latent, wanted, atol=1e-6, rtol=1e-5)


def test_decode_is_cancelled_between_frames_and_works_again(ask, checkpoint, every_part):
    latent, seen = torch.randn(1, 16, 4, 2, 2), []
    message = Decode(model=one_rank(checkpoint))
    with pytest.raises(Cancelled):
        ask(
            message,
            {"latent": latent},
            report=lambda progress, _: seen.append((progress.phase, progress.value)),
            cancelled=lambda: ("decoding", 2) in seen,
        )
    assert seen[2:] == [("decoding", 1), ("decoding", 2)]
    assert ask(message, {"latent": latent})["pixels"].shape == (1, 13, 16, 16, 3)


@pytest.mark.parametrize(
    ("message", "name", "shape", "words"),
    [
        (Decode, "latent", (1, 4, 1, 4, 4), "4 channels and this VAE takes 16"),
        (Decode, "latent", (1, 16, 4, 4), "of 5 dims"),
        (Decode, "latent", (0, 16, 1, 4, 4), "none of them empty"),
        (Decode, "pixels", (1, 16, 1, 4, 4), "takes exactly one tensor: latent"),
        (Encode, "pixels", (1, 1, 12, 16, 3), "multiples of 8"),
        (Encode, "pixels", (1, 1, 16, 16, 4), "3"),
    ],
)
def test_shapes_that_the_vae_cannot_take(ask, checkpoint, message, name, shape, words):
    with pytest.raises(InvalidRequest, match=words):
        ask(message(model=one_rank(checkpoint)), {name: torch.zeros(shape)})


def test_nan_in_a_latent_to_decode(ask, checkpoint, engine):
    with pytest.raises(InvalidRequest, match="NaN"):
        ask(Decode(model=one_rank(checkpoint)), {"latent": torch.full((1, 16, 1, 2, 2), float("nan"))})
    assert engine.snapshot()[0] == ()


def test_a_checkpoint_without_a_vae(ask, tmp_path, engine):
    path = tiny.write(tmp_path / "model", tiny.Tiny(vae=False))
    with pytest.raises(InvalidRequest, match=r"has no vae \(its parts: transformer, text_encoder"):
        ask(Decode(model=one_rank(path)), {"latent": torch.zeros(1, 16, 1, 2, 2)})
    assert engine.snapshot()[0] == ()


def test_a_vae_class_that_is_not_supported(ask, tmp_path, checkpoint):
    path = shutil.copytree(checkpoint, tmp_path / "model")
    index = json.loads((path / "model_index.json").read_text())
    index["vae"] = ["diffusers", "AutoencoderDC"]
    (path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(InvalidRequest, match="vae class AutoencoderDC is not supported; supported: AutoencoderKL, "):
        ask(Decode(model=one_rank(path)), {"latent": torch.zeros(1, 16, 1, 2, 2)})


def test_replaced_files_are_loaded_anew(ask, checkpoint, engine, tmp_path):
    path = shutil.copytree(checkpoint, tmp_path / "model")
    before = open_checkpoint(path).stamp()
    assert before == open_checkpoint(path).stamp()
    old, inputs = one_rank(path, stamp=before), {"ids": IDS, "lengths": LENGTHS}
    first = ask(EncodeText(model=old), inputs)["embeds"]
    weights = path / "text_encoder" / "model.safetensors"
    negated = {name: -tensor for name, tensor in load_file(weights).items()}
    weights.unlink()
    save_file(negated, weights, metadata={"format": "pt"})
    assert torch.equal(ask(EncodeText(model=old), inputs)["embeds"], first)
    new = one_rank(path, stamp=open_checkpoint(path).stamp())
    assert new != old
    assert not torch.equal(ask(EncodeText(model=new), inputs)["embeds"], first)
    assert len(engine.snapshot()[0]) == 1, "the old weights are gone"


def test_a_stamp_follows_links_and_bears_dangling_ones(checkpoint, tmp_path):
    path = shutil.copytree(checkpoint, tmp_path / "model")
    (path / "text_encoder").rename(tmp_path / "shared")
    (path / "text_encoder").symlink_to(tmp_path / "shared")
    (path / "vae" / "gone.safetensors").symlink_to(tmp_path / "gone")
    before = open_checkpoint(path).stamp()
    config = tmp_path / "shared" / "config.json"
    config.write_text(config.read_text() + " ")
    assert open_checkpoint(path).stamp() != before


def test_parts_load_when_needed_and_unload_frees_them(ask, checkpoint, engine):
    model = one_rank(checkpoint)
    assert engine.snapshot() == ((), 0, 0)
    ask(EncodeText(model=model), {"ids": IDS, "lengths": LENGTHS})
    ask(Decode(model=one_rank(checkpoint, dtype="float32")), {"latent": torch.zeros(1, 16, 1, 2, 2)})
    (loaded,) = engine.snapshot()[0]
    assert (loaded.parts, loaded.loads, loaded.dtype) == (("text_encoder", "vae"), 2, "float32")
    ask(Unload(model=model), {})
    assert engine.snapshot()[0] == (loaded,), "the same weights are in use as float32, which auto means here"
    ask(Unload(model=one_rank(checkpoint, dtype="float32"), only_cache=True), {})
    assert engine.snapshot()[0]
    ask(Unload(model=one_rank(checkpoint, dtype="float32")), {})
    assert engine.snapshot()[0] == ()
    ask(EncodeText(model=model), {"ids": IDS, "lengths": LENGTHS})
    assert engine.snapshot()[0][0].parts == ("text_encoder",)
