"""What ``verify MODEL`` decides before anything runs: inputs for any checkpoint, layouts, tolerances; its reports."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from parallel_backend.__main__ import main
from parallel_backend.errors import InvalidRequest
from parallel_backend.families.registry import family_of
from parallel_backend.layout.choice import auto
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.model_spec import Devices
from parallel_backend.verify import examples, real
from parallel_backend.verify.report import Report, show
from tests.support import tiny

SHAPES = str(Path(__file__).parents[3] / "checkpoints" / "shapes")
WAN = "WanTransformer3DModel"
CPU = torch.device("cpu")


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
        ((SHAPES, "--layout", "tensor=5"), 'this model has 4 attention heads'),
        ((SHAPES, "--layout", "cfg=2 ulysses=2", "--ranks", "3"), 'there are 3; would work: "ulysses=3"'),
        ((SHAPES, "--ranks", "99"), "there is no device"),
        ((SHAPES, "--ranks", "0"), "--ranks 0: at least 1"),
        ((SHAPES, "--devices", "0,0"), "0 is listed twice"),
        ((SHAPES, "--devices", "0,1", "--ranks", "3"), "--ranks 3 needs 3 ranks and --devices '0,1' means 2 CPU ranks"),
        ((SHAPES, "--devices", "0", "--layout", "ring=2"), "layout \"ring=2\" needs 2 ranks and --devices '0' means 1"),
        ((SHAPES, "--size", "wide"), "write TxHxW"),
        ((SHAPES, "--size", "8x8"), "--size 8x8: latents of this model are TxHxW"),
        ((SHAPES, "--text-tokens", "0"), "--text-tokens 0"),
    ],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(capsys, arguments, sentence):
    assert main(["verify", *arguments]) == 1
    assert sentence in capsys.readouterr().err


def test_without_a_model_nothing_is_compared(capsys):
    with pytest.raises(SystemExit):
        main(["verify"])
    assert "the following arguments are required: MODEL" in capsys.readouterr().err


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
    status = show([report], as_json=False, single=True)
    assert capsys.readouterr().out.splitlines()[0] == line
    assert status == int(report.failed)
