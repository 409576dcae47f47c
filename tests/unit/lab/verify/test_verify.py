"""What ``verify`` decides before anything runs: inputs for any checkpoint, shapes, layouts, tolerances."""

import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lab.verify import command
from lab.verify.forward.matrix import every, named
from lab.verify.loops import quality
from parallel_backend.__main__ import main
from parallel_backend.errors import InvalidRequest
from parallel_backend.families.registry import family_of
from parallel_backend.interfaces.geometry import IMAGE
from parallel_backend.layout.parallel_layout import ParallelLayout, auto
from parallel_backend.protocol.model_spec import Devices
from parallel_backend.verify import examples, real
from parallel_backend.verify.run import Report
from tests.support import tiny

SHAPES = str(Path(__file__).parents[3] / "checkpoints" / "shapes")
WAN = "WanTransformer3DModel"
CPU = torch.device("cpu")
NOT_OF_THE_CONFIG = ("size", "frames", "tokens", "text")


@pytest.mark.parametrize(("name", "kind"), list(examples.variants()))
def test_inputs_fit_a_checkpoint_of_other_widths(name, kind):
    variant, family = examples.variant(name, kind), family_of(name)
    words = {dim for shape in variant.inputs.values() for dim in shape if isinstance(dim, str)}
    wider = {word: 3 * variant.config[word] for word in words - set(NOT_OF_THE_CONFIG)}
    shapes = examples.input_shapes(
        family, {**variant.config, **wider}, variant.inputs, batch=2, size=variant.size, text=variant.text
    )
    family.extent({**variant.config, **wider}, shapes)
    assert wider or not variant.inputs.keys() & {"encoder_hidden_states"}


@pytest.mark.parametrize(("name", "kind"), list(examples.variants()))
def test_even_shapes_are_divisible_where_the_model_takes_them(name, kind):
    variant, family = examples.variant(name, kind), family_of(name)
    size, text = examples.evenly_divisible_size(name, kind)
    shapes = examples.input_shapes(family, variant.config, variant.inputs, batch=1, size=size, text=text)
    if kind == "5b i2v":
        with pytest.raises(InvalidRequest, match="learned its positions for 3 x 6 x 10 alone"):
            family.extent(variant.config, shapes)
        return
    extent = family.extent(variant.config, shapes)
    assert extent.streams[IMAGE] % 4 == 0
    assert all(tokens % 4 == 0 for tokens in extent.streams.values()) or variant.fixed_text


def test_the_matrix_has_both_shapes_of_every_variant_and_the_named_ones():
    kinds = set(examples.variants())
    assert {(cell.class_name, cell.variant) for cell in every() if cell.size is None} == kinds
    assert {(cell.class_name, cell.variant) for cell in every() if cell.size is not None} == kinds
    assert {cell.size for cell in named()} == {(128, 128), (21, 60, 104), (13, 60, 90), (9, 40, 64)}


def test_a_checkpoint_is_opened_without_its_weights():
    opened = real.open_real(SHAPES, "auto", None, None, CPU)
    assert (opened.variant, opened.dtype, len(opened.inputs)) == ("t2v", "float32", 2)
    assert opened.inputs[0]["encoder_hidden_states"].shape == (2, 9, 64)
    assert real.open_real("shapes", "auto", (1, 8, 8), 5, CPU).inputs[1]["encoder_hidden_states"].shape == (2, 3, 64)
    with pytest.raises(InvalidRequest, match=r'cfg=4: there are 2 branches.*would work: "cfg=2 ulysses=2"'):
        opened.check(ParallelLayout(cfg=4), Devices(kind="cpu", indices=(0, 1, 2, 3)))


def test_a_model_whose_inputs_are_not_known_is_refused(tmp_path, monkeypatch):
    path, variant = tiny.write(tmp_path / "model", tiny.Tiny(vae=False)), examples.variant(WAN, "t2v")
    odd = replace(variant, inputs={"encoder_hidden_states": ("text", "missing_dim")})
    monkeypatch.setattr(family_of(WAN), "variants", staticmethod(lambda: {"t2v": odd}))
    with pytest.raises(InvalidRequest, match=r"no example inputs of Wan fit this model.*t2v: .*missing_dim"):
        real.open_real(str(path), "auto", None, None, CPU)


def test_a_size_beyond_the_model_is_refused(tmp_path):
    path = tiny.write(tmp_path / "model", tiny.Tiny(vae=False))
    opened = real.open_real(str(path), "auto", (1, 2, 200), None, CPU)
    with pytest.raises(InvalidRequest, match="100 patches long"):
        opened.check(ParallelLayout(), Devices(kind="cpu", indices=(0,)))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_layouts_of_a_checkpoint(ranks):
    layouts = real.layouts_on(ranks)
    assert layouts[0] == auto((ranks,), branches=2)
    assert len(set(layouts)) == len(layouts)
    assert max(layout.ranks for layout in layouts) == ranks
    if ranks > 1:
        alone = {axis for layout in layouts for axis, degree in layout.degrees.items() if degree == layout.ranks}
        assert alone == {"cfg", "data", "ulysses", "ring", "tensor", "pipe"}
        assert any(layout.shard_weights for layout in layouts)


def test_the_tolerance_follows_from_the_dtype():
    assert real.tolerance(torch.float32, 60) == 1e-4
    assert math.isclose(real.tolerance(torch.bfloat16, 25), 10 * 2**-7)
    assert math.isclose(real.tolerance(torch.float16, 25), 10 * 2**-10)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("nowhere",), "no model 'nowhere'"),
        ((SHAPES, "--family", "wan"), "--family selects small models"),
        ((SHAPES, "--layout", "tensor=5"), 'this model has 4 attention heads'),
        ((SHAPES, "--layout", "cfg=2 ulysses=2", "--ranks", "3"), 'there are 3; would work: "ulysses=3"'),
        ((SHAPES, "--ranks", "99"), "there is no device"),
        ((SHAPES, "--ranks", "0"), "--ranks 0: at least 1"),
        ((SHAPES, "--devices", "0,0"), "0 is listed twice"),
        ((SHAPES, "--devices", "0,1", "--ranks", "3"), "--ranks 3 needs 3 ranks and --devices '0,1' means 2 CPU ranks"),
        ((SHAPES, "--devices", "0", "--layout", "ring=2"), "layout \"ring=2\" needs 2 ranks and --devices '0' means 1"),
        (("--devices", "cuda:0", "--layout", "ring=2"), "there is no GPU here"),
        (("--devices", "0,1", "--layout", "ring=3"), 'layout "ring=3" needs 3 ranks'),
        (("--memory", "--devices", "0,1"), 'layout "ulysses=4 shard_weights" needs 4 ranks'),
        (("--vae", "image", "--devices", "0"), "--ranks 2 needs 2 ranks"),
        ((SHAPES, "--size", "wide"), "write TxHxW"),
        ((SHAPES, "--size", "8x8"), "--size 8x8: latents of this model are TxHxW"),
        ((SHAPES, "--text-tokens", "0"), "--text-tokens 0"),
        (("--dtype", "bfloat16"), "--dtype needs a MODEL"),
        (("--memory", "--family", "wan"), "leave family out"),
        (("--vae", "cake"), "--vae cake: image, flux2,"),
        (("--vae", "image", "--layout", "ring=2"), "leave layout out"),
        (("--vae", "image", "--size", "3x4x5"), "--size 3x4x5: latents of image are HxW"),
        (("--vae", "image", "--ranks", "0"), "--ranks 0: at least 1"),
        (("--vae", "image", "--width", "4"), "--width 4: at least 8"),
        (("--encode",), "--encode and --width need --vae"),
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


@pytest.mark.parametrize(
    ("report", "line"),
    [
        (Report(cell="a", skipped="why"), "skipped  a: why"),
        (Report(cell="a", max_rel_error=1e-6), "equal    a: 1.0e-06"),
        (Report(cell="a", max_rel_error=1e-3, seconds_per_step=2.0), "FAILED   a: 1.0e-03; 2.000 s per step"),
        (Report(cell="a", bytes_sent_per_rank=(1,)), "FAILED   a: 0.0e+00; sent (1,) bytes, the formulas say ()"),
        (
            Report(cell="a", seconds_per_step=2.0, seconds_per_step_one_rank=3.0),
            "equal    a: 0.0e+00; 2.000 s per step, one rank 3.000 s",
        ),
    ],
)
def test_what_a_report_says(capsys, report, line):
    status = command.show([report], as_json=False, single=True)
    assert capsys.readouterr().out.splitlines()[0] == line
    assert status == int(report.failed)


def test_verify_computes_float32_in_full_here_and_in_its_ranks(monkeypatch):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    assert main(["verify", "--encode"]) == 1
    assert os.environ["NVIDIA_TF32_OVERRIDE"] == "0"
    assert not torch.backends.cuda.matmul.allow_tf32
    assert not torch.backends.cudnn.allow_tf32
