"""The prompt of ``bench recovery``."""

from pathlib import Path

import pytest

from lab.bench import prompt, recovery
from lab.bench.recovery import ROWS, Recovery
from parallel_backend.checkpoint.opening import open_checkpoint


def test_the_shipped_checkpoint_has_every_part_of_a_prompt(tmp_path: Path) -> None:
    parts = open_checkpoint(Path(prompt.shipped_or_tiny(tmp_path))).components
    assert {"text_encoder", "transformer", "vae"} <= parts.keys()
    assert not list(tmp_path.iterdir())


def test_without_it_a_tiny_model_takes_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt, "SHIPPED", tmp_path / "absent")
    checkpoint = open_checkpoint(Path(prompt.shipped_or_tiny(tmp_path / "model")))
    assert checkpoint.components == {"transformer": "WanTransformer3DModel"}
    assert checkpoint.config("transformer")["text_dim"] == prompt.TEXT


def recovery_of(spares: int, after: float) -> Recovery:
    seconds = {row: [1.0, 2.0, after] for row in ROWS} | {"warm": [2.0, 2.0]}
    return Recovery(spares=spares, seconds=seconds, spare_memory=spares * 100 << 20)


def test_the_table_and_the_goal() -> None:
    without, slow, fast = recovery_of(0, 20.0), recovery_of(2, 1.5), recovery_of(2, 1.5)
    slow.seconds["idle"][:] = [2.0 + recovery.GOAL + 0.1]
    text = recovery.describe(without, fast)
    assert "a warm prompt" in text
    assert "1.50 (-0.50)" in text
    assert "passed   at most 5 s longer with spare ranks; a spare rank takes 200 MiB" in text
    assert recovery.describe(without, slow).splitlines()[-1].startswith("FAILED")
    assert slow.failed
    assert not fast.failed
    slow_without = recovery_of(0, 20.0)
    slow_without.seconds["idle"][:] = [100.0]
    assert not slow_without.failed, "nothing is promised without spare ranks"
