"""What ranks send in published models."""

from typing import Any

import pytest

from lab.__main__ import main
from tests.support.bench_json import results


def sent(capsys, *options):
    assert main(["bench", "sent", "--json", *options]) == 0
    return {each["model"]: each["by_layout"] for each in results(capsys.readouterr().out, list[dict[str, Any]])}


def test_whole_frames_are_half_of_what_ulysses_sends(capsys):
    found = sent(capsys)
    for model in ("open_sora1", "latte"):
        for ranks in (2, 4, 8):
            assert found[model][f"dsp={ranks}"] == pytest.approx(found[model][f"ulysses={ranks}"] / 2, rel=0.05)
    assert not any("dsp" in layout for layout in found["open_sora2"])


def test_it_counts_by_hand_what_ulysses_sends(capsys):
    """Two ranks: half of q, k, v and output of each token, for 57 layers of 3072 features in two bytes."""
    tokens = 33 * 48 * 48 + 512
    by_hand = tokens // 2 * 4 * 3072 // 2 * 57 * 2
    prediction = 33 * 48 * 48 // 2 * 64 * 2
    found = sent(capsys, "--model", "open_sora2", "--layout", "ulysses=2")["open_sora2"]["ulysses=2"]
    assert by_hand <= found <= by_hand + prediction


def test_a_layout_that_no_model_takes_is_refused(capsys):
    assert main(["bench", "sent", "--model", "open_sora2", "--layout", "dsp=2"]) == 1
    assert "takes none of these layouts" in capsys.readouterr().err
