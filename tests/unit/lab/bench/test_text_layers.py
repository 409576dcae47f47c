"""What layers for the prompt take in published models."""

from dataclasses import replace
from typing import Any

import pytest

from lab.__main__ import main
from lab.bench import text_layers
from tests.support.bench_json import results


@pytest.fixture
def small(monkeypatch):
    models = {name: replace(model, size=(2, 4, 4), after=64) for name, model in text_layers.MODELS.items()}
    monkeypatch.setattr(text_layers, "MODELS", models)


@pytest.mark.long
def test_weights_and_prompts_by_hand(small, capsys):
    """In two bytes: projections and feed-forwards of H3's two blocks, and of LTX-2's two connectors of two blocks.

    The rest are gates, norms and registers.
    """
    assert main(["bench", "text", "--json", "--rounds", "1"]) == 0
    found = {each["model"]: each for each in results(capsys.readouterr().out, list[dict[str, Any]])}
    h3 = 2 * (5120 * 5376 + 2 * (4 * 5376 * 7168 + 3 * 5376 * 14336))
    ltx2, newer = 2 * 2 * 2 * 12 * 3840**2, 2 * 8 * 12 * (4096**2 + 2048**2)
    for model, weights in (("minimax_h3", h3), ("ltx2", ltx2), ("ltx2.3", newer)):
        assert weights <= found[model]["weights"] <= 1.002 * weights
        assert 0 < found[model]["seconds"] < found[model]["step"]
    assert found["minimax_h3"]["prompt"] == [512 * 5120 * 2, 64 * 5376 * 2]
    assert found["ltx2"]["prompt"] == [128 * 3840 * 2, 64 * 7680 * 2]
    assert found["ltx2.3"]["prompt"] == [128 * 6144 * 2, 64 * 6144 * 2]


def test_no_round_is_refused(capsys):
    assert main(["bench", "text", "--rounds", "0"]) == 1
    assert "at least one is needed" in capsys.readouterr().err
