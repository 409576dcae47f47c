"""What ``verify`` decides before anything runs: inputs for any checkpoint, shapes, layouts, tolerances."""

import math
import os
from dataclasses import replace

import pytest
import torch

from lab.__main__ import main
from lab.verify.forward.matrix import every, named
from lab.verify.loops import cache_quality, quality
from parallel_backend.errors import InvalidRequest
from parallel_backend.families.registry import family_of
from parallel_backend.interfaces.geometry import IMAGE
from parallel_backend.interfaces.input_shapes import input_shapes
from parallel_backend.verify import examples

WAN = "WanTransformer3DModel"
CPU = torch.device("cpu")
NOT_OF_THE_CONFIG = ("size", "frames", "tokens", "text")
OF_HEADS = {"cross_attention_dim": "attention_head_dim", "audio_cross_attention_dim": "audio_attention_head_dim"}
"""Widths of a text that are those of the model, and what these follow from."""


@pytest.mark.parametrize(("name", "kind"), list(examples.variants()))
def test_inputs_fit_a_checkpoint_of_other_widths(name, kind):
    variant, family = examples.variant(name, kind), family_of(name)
    words = {dim for shape in variant.inputs.values() for dim in shape if isinstance(dim, str)}
    words |= {OF_HEADS[word] for word in words & OF_HEADS.keys()}
    wider = {word: 3 * variant.config[word] for word in words - set(NOT_OF_THE_CONFIG)}
    shapes = input_shapes(
        family, {**variant.config, **wider}, variant.inputs, batch=2, size=variant.size, text=variant.text
    )
    family.extent({**variant.config, **wider}, shapes)
    assert wider or not variant.inputs.keys() & {"encoder_hidden_states"}


@pytest.mark.parametrize(("name", "kind"), list(examples.variants()))
def test_even_shapes_are_divisible_where_the_model_takes_them(name, kind):
    variant, family = examples.variant(name, kind), family_of(name)
    size, text = examples.evenly_divisible_size(name, kind)
    shapes = input_shapes(family, variant.config, variant.inputs, batch=1, size=size, text=text)
    if kind == "5b i2v":
        with pytest.raises(InvalidRequest, match="learned its positions for 3 x 6 x 10 alone"):
            family.extent(variant.config, shapes)
        return
    extent = family.extent(variant.config, shapes)
    assert math.prod(family.describe(variant.config).grid(size)) % 4 == 0
    if len(family.latents) > 1:  # the size does not decide how many tokens the sound has
        return
    assert extent.streams[IMAGE] % 4 == 0
    assert all(tokens % 4 == 0 for tokens in extent.streams.values()) or variant.fixed_text


def test_the_matrix_has_both_shapes_of_every_variant_and_the_named_ones():
    kinds = set(examples.variants())
    assert {(cell.class_name, cell.variant) for cell in every() if cell.size is None} == kinds
    assert {(cell.class_name, cell.variant) for cell in every() if cell.size is not None} == kinds
    assert {cell.size for cell in named()} == {(128, 128), (21, 60, 104), (13, 60, 90), (9, 40, 64)}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--devices", "cuda:0", "--layout", "ring=2"), "there is no GPU here"),
        (("--devices", "0,1", "--layout", "ring=3"), 'layout "ring=3" needs 3 ranks'),
        (("--memory", "--devices", "0,1"), 'layout "ulysses=4 shard_weights" needs 4 ranks'),
        (("--vae", "image", "--devices", "0"), "--ranks 2 needs 2 ranks"),
        (("--memory", "--family", "wan"), "leave family out"),
        (("--vae", "cake"), "--vae cake: image, flux2,"),
        (("--vae", "image", "--layout", "ring=2"), "leave layout out"),
        (("--vae", "image", "--size", "3x4x5"), "--size 3x4x5: latents of image are HxW"),
        (("--vae", "image", "--ranks", "0"), "--ranks 0: at least 1"),
        (("--vae", "image", "--width", "4"), "--width 4: at least 8"),
        (("--encode",), "--encode, --width and --dtype need --vae"),
    ],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(capsys, arguments, sentence):
    assert main(["verify", *arguments]) == 1
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--warmup", "soon"], "--warmup soon: write a number of steps"),
        (["--warmup", "1", "--layout", "ulysses=2"], 'layout "ulysses=2" is exact in all steps'),
        (["--warmup", "1", "--named"], "leave named out"),
        (["--quality", "--layout", "cfg=2"], '--layout "cfg=2" is exact'),
        (["--quality", "--family", "flux"], "leave family out"),
        (["--quality", "--cache", "--layout", "cfg=2"], "leave layout out"),
        (["--quality", "--prompts", "4"], "leave prompts out"),
        (["--quality", "--cache", "--prompts", "65"], "--prompts 65: there are 64"),
        (["--cache"], "--cache and --prompts need --quality"),
        (["--quality", "--layout", "pipe=3", "--devices", "0,1"], "needs 3 ranks"),
        (["--warmup", "1", "--devices", "0,1", "--ranks", "3"], "needs 3 ranks"),
        (["--warmup", "0", "--layout", "pipe=2"], "warmup of at least 1 would work"),
    ],
)
def test_step_loop_options_that_make_no_sense_are_refused(capsys, options, sentence):
    assert main(["verify", *options]) == 1
    assert sentence in capsys.readouterr().err


def test_the_quality_table():
    layouts = quality.with_warmups(("pipe=2", "ring=2 stale=none"), (1, 4))
    assert [str(layout) for layout in layouts] == [
        "pipe=2", "pipe=2 warmup=4", "ring=2 stale=none", "ring=2 stale=none warmup=4",
    ]  # fmt: skip
    row = quality.Quality(
        layout="pipe=2", approximation="PipeFusion", warmup=4, pairs=256, psnr=30.04, ssim=0.9876, accuracy=96.4,
        lost=(0.5, -0.2, 1.2),
    )  # fmt: skip
    head, rule, exact, line = quality.markdown([row], 96.9).splitlines()
    assert head.count("|") == rule.count("|") == exact.count("|") == line.count("|") == 8
    assert "| 30.0 dB | 0.988 | 96.4 % | +0.5 points (-0.2 to +1.2) |" in line
    naive = replace(row, layout="ring=2 stale=none", approximation="naive patch", psnr=20.0, lost=(9.0, 7.0, 11.0))
    assert quality.failures([row, naive]) == []
    assert "pipe=2 after 4 steps of warm-up may lose 2.1" in quality.failures([replace(row, lost=(1.0, 0.1, 2.1))])[0]
    assert "not clearly closer to the exact pictures" in quality.failures([replace(row, psnr=25.9), naive])[0]


def test_the_quality_table_of_caches():
    row = cache_quality.CacheQuality(
        kind="image", mode="safe", steps=24, saved=1.846, psnr=54.51, low=50.04, ssim=0.99912, distance=0.00012
    )
    head, rule, line = cache_quality.markdown([row]).splitlines()
    assert head.count("|") == rule.count("|") == line.count("|") == 8
    assert "| image | 24 | `safe` | 1.85x | 54.5 / 50.0 dB | 0.9991 | 0.00012 |" in line
    assert cache_quality.failures([row, replace(row, kind="video", psnr=20.0)]) == []
    (failure,) = cache_quality.failures([replace(row, low=46.9)])
    assert failure == "safe with 24 steps saves 1.85x at 54.5 / 46.9 dB, and 1.84x at 50 / 47 dB is promised"
    assert cache_quality.failures([replace(row, steps=8, saved=1.0, psnr=40.9)])


def test_verify_computes_float32_in_full_here_and_in_its_ranks(monkeypatch):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    assert main(["verify", "--encode"]) == 1
    assert os.environ["NVIDIA_TF32_OVERRIDE"] == "0"
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cudnn.allow_tf32
