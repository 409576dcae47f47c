"""Estimates of a request's tensors: every model has a row, and a measurement agrees with it."""

from dataclasses import replace

import pytest
import torch

from lab.verify.vae.kinds import KINDS
from lab.working_memory import text_factors, transformer_factor, vae_factors
from parallel_backend import env
from parallel_backend.checkpoint.opening import open_checkpoint
from parallel_backend.engine import working_memory
from parallel_backend.engine.validation import check_sample
from parallel_backend.engine.working_memory import coding_bytes, first_width, forward_bytes, text_bytes, vae_kind
from parallel_backend.errors import NoRoom
from parallel_backend.families.registry import FAMILIES, family_of
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.loading.load import SUPPORTED
from parallel_backend.protocol import rank_control
from parallel_backend.protocol.messages import EncodeText
from parallel_backend.protocol.tensors import describe
from parallel_backend.vaes import VAES
from tests.ranks import requests
from tests.ranks.requests import Case
from tests.support import tiny
from tests.unit.conftest import one_rank


def test_every_family_and_every_vae_has_a_row():
    assert all(family_of(name).values_alive > 1 for name in FAMILIES)
    kinds = {vae_kind(kind.class_name, kind.config(128)) for kind in KINDS.values()}
    assert set(working_memory._CODING) == {(kind, encode) for kind in kinds for encode in (False, True)}
    assert {kind.split()[0] for kind in kinds} == set(VAES)
    assert set(working_memory._TEXT) == set(SUPPORTED["text_encoder"])


def test_a_measurement_gives_the_rows():
    name = "WanTransformer3DModel"
    assert transformer_factor(name) == pytest.approx(family_of(name).values_alive, rel=0.05)
    measured = vae_factors(KINDS["image"], encode=False)
    assert measured == pytest.approx(working_memory._CODING["AutoencoderKL", False], rel=0.05, abs=0.05)
    for name, (by_feature, by_pair) in working_memory._TEXT.items():
        feature, pair = text_factors(name)
        assert feature == pytest.approx(by_feature, rel=0.05)
        assert 0.45 * by_pair <= pair <= 1.05 * by_pair  # by the version of transformers


def test_a_vae_takes_what_its_pixels_its_width_and_its_frames_take():
    config = {"block_out_channels": [8, 16]}
    assert coding_bytes("AutoencoderKL", config, pixels=100, frames=1, encode=False, itemsize=4) == 100 * 8 * 24
    assert coding_bytes("AutoencoderKL", config, pixels=100, frames=1, encode=False, itemsize=2) == 100 * 8 * 12
    one, two = (
        coding_bytes("AutoencoderKLHunyuanVideo", config, pixels=100, frames=frames, encode=False, itemsize=4)
        for frames in (9, 10)
    )
    assert two - one == pytest.approx(100 * 8 * 35.1, abs=1)
    assert first_width({"decoder_base_dim": 5, "base_dim": 3}) == 5


def test_a_text_takes_what_its_tokens_and_their_pairs_take():
    config = {"d_ff": 100, "num_heads": 2}
    assert text_bytes("T5EncoderModel", config, texts=3, tokens=10, itemsize=2) == 3 * 2 * (2400 + 1200)


def test_texts_without_room_are_refused_and_the_encoder_stays(engine, ask, checkpoint, monkeypatch):
    text = {"ids": torch.tensor([[3, 4, 1]]), "lengths": torch.tensor([3])}
    ask(EncodeText(model=one_rank(checkpoint)), text)
    monkeypatch.setenv(env.MEMORY_LIMIT.name, "1MB")
    many = {"ids": torch.full((500, 60), 3), "lengths": torch.full((500,), 60)}
    with pytest.raises(NoRoom, match=r"^rank 0 \(cpu\) has room for 1.00 MB .*, encode fewer or shorter texts"):
        ask(EncodeText(model=one_rank(checkpoint)), many)
    ask(EncodeText(model=one_rank(checkpoint)), text)
    assert engine.snapshot()[0][0].loads == 1


def test_ranks_share_the_tokens_of_a_forward(checkpoint):
    sizes = {}
    for layout in ("", "ulysses=2", "ulysses=2 cfg=2", "tensor=2"):
        message, tensors = requests.sample(requests.spec(checkpoint, layout), Case())
        plan = check_sample(message, describe(tensors), open_checkpoint(checkpoint), 4)
        sizes[layout] = forward_bytes("WanTransformer3DModel", plan, 0, 4)
    assert sizes[""] == 2 * sizes["ulysses=2"] == 2 * sizes["ulysses=2 cfg=2"] == 2 * sizes["tensor=2"] > 0


@pytest.mark.parametrize(
    ("layout", "share"), [("ring=2 stale=previous", 1), ("pipe=2 patches=3", 2), ("pipe=2 ulysses=2 patches=3", 4)]
)
def test_approximate_layouts_keep_keys_and_values_of_the_whole_image(checkpoint, layout, share):
    sizes, tokens, samples = tiny.Tiny(), 36, 2
    message, tensors = requests.sample(requests.spec(checkpoint, layout), Case(batch=samples))
    plan = check_sample(message, describe(tensors), open_checkpoint(checkpoint), 4)
    kept = 2 * samples * sizes.layers * 2 * sizes.heads * sizes.head_dim * tokens * 4 // share
    exact = replace(plan, layout=ParallelLayout(ulysses=2))
    assert working_memory._kept_bytes(plan, plan.layout.coordinates(0), 4) == kept
    assert working_memory._kept_bytes(exact, plan.layout.coordinates(0), 4) == 0
    assert forward_bytes("WanTransformer3DModel", plan, 0, 4) >= kept


def test_one_rank_that_runs_out_of_memory_stays_usable(engine, ask, checkpoint, monkeypatch):
    text = {"ids": torch.tensor([[3, 4, 1]]), "lengths": torch.tensor([3])}
    ask(EncodeText(model=one_rank(checkpoint)), text)

    def full(*_, **__):
        raise torch.OutOfMemoryError("tried to allocate 3 GiB")

    with monkeypatch.context() as patch:
        patch.setattr("parallel_backend.engine.text_encoding.encode", full)
        with pytest.raises(NoRoom, match=r"rank 0 \(cpu\) ran out of memory: tried to allocate 3 GiB"):
            ask(EncodeText(model=one_rank(checkpoint)), text)
    assert NoRoom.code in rank_control.RECOVERABLE
    ask(EncodeText(model=one_rank(checkpoint)), text)
    assert engine.snapshot()[0][0].loads == 1
