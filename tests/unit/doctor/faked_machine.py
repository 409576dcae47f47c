"""What the tests of checks share: a setting, GPUs that are not there, and how findings are read."""

import pytest

from parallel_backend.client import gpus as known_gpus
from parallel_backend.doctor.checks import gpus
from parallel_backend.doctor.finding import Finding, Setting

SETTING = Setting(folder="/none")
CARD = ["A card", "570.1", "16", "16"]


def verdicts(found: list[Finding]) -> list[str]:
    assert all(finding.text for finding in found)
    assert all(finding.advice for finding in found if finding.verdict in ("slow", "broken"))
    return [finding.verdict for finding in found]


def have(monkeypatch: pytest.MonkeyPatch, count: int, cards: list[list[str]] | None = None) -> None:
    """Let torch see this many GPUs, and nvidia-smi list these."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(known_gpus, "count", lambda: count)
    monkeypatch.setattr(known_gpus, "other_accelerator", lambda: "")
    monkeypatch.setattr(gpus, "_cards", lambda: [CARD] * count if cards is None else cards)
    monkeypatch.setattr(gpus, "_try", lambda index: (f"A card {index}", 78_000_000_000, 80_000_000_000))
