"""The checks of GPUs find what is fine, slow, broken or not here, with nvidia-smi and torch faked."""

import pytest

from parallel_backend.client import gpus as known_gpus
from parallel_backend.doctor.checks import gpus
from tests.unit.doctor.faked_machine import CARD, SETTING, have, verdicts


def test_gpus(monkeypatch):
    have(monkeypatch, 0)
    assert verdicts(gpus.gpus(SETTING)) == ["not here"]
    have(monkeypatch, 2)
    assert verdicts(gpus.gpus(SETTING)) == ["fine", "fine"]
    have(monkeypatch, 2, [CARD, ["A card", "570.1", "4", "16"]])
    assert verdicts(gpus.gpus(SETTING)) == ["fine", "slow"]
    have(monkeypatch, 1, [["A card", "570.1", "[N/A]", "[N/A]"]])
    assert verdicts(gpus.gpus(SETTING)) == ["fine"]
    monkeypatch.setattr(gpus, "_try", lambda index: ("A card", 1_000_000_000, 80_000_000_000))
    assert verdicts(gpus.gpus(SETTING)) == ["slow"]


def test_a_gpu_that_does_not_compute(monkeypatch):
    def fails(index: int) -> tuple[str, int, int]:
        raise RuntimeError("CUDA error: no kernel image is available\nfor execution")

    have(monkeypatch, 1)
    monkeypatch.setattr(gpus, "_try", fails)
    assert verdicts(gpus.gpus(SETTING)) == ["broken"]
    assert "no kernel image is available for execution" in gpus.gpus(SETTING)[0].text


@pytest.mark.parametrize(("cuda", "advice"), [(None, "has no CUDA"), ("13.0", "too old for CUDA 13.0")])
def test_gpus_that_torch_does_not_see(monkeypatch, cuda, advice):
    have(monkeypatch, 0, [CARD])
    monkeypatch.setattr(gpus, "_torch_build", lambda: ("2.9.0", cuda))
    found = gpus.gpus(SETTING)
    assert verdicts(found) == ["broken"]
    assert advice in found[0].advice


def test_hidden_gpus_and_other_accelerators(monkeypatch):
    have(monkeypatch, 0, [CARD])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert verdicts(gpus.gpus(SETTING)) == ["not here"]
    have(monkeypatch, 0, [])
    monkeypatch.setattr(known_gpus, "other_accelerator", lambda: "Intel GPUs (xpu)")
    assert "Intel GPUs (xpu)" in gpus.gpus(SETTING)[0].text


def test_what_nvidia_smi_says(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus._cards() == []
    tool.write_text('#!/bin/sh\necho "A card, 570.1, 8, 16"\n')
    tool.chmod(0o700)
    assert gpus._cards() == [["A card", "570.1", "8", "16"]]
    tool.write_text('#!/bin/sh\necho "Driver/library version mismatch"; exit 18\n')
    with pytest.raises(RuntimeError, match="mismatch"):
        gpus._cards()


def test_nccl(monkeypatch):
    have(monkeypatch, 0)
    assert verdicts(gpus.nccl(SETTING)) == ["not here"]
    have(monkeypatch, 2)
    for version, verdict in (((2, 27, 3), "fine"), ((2, 14, 3), "slow"), (None, "broken")):
        monkeypatch.setattr(gpus, "_nccl_version", lambda version=version: version)
        assert verdicts(gpus.nccl(SETTING)) == [verdict]


def test_links(monkeypatch):
    have(monkeypatch, 1)
    assert verdicts(gpus.links(SETTING)) == ["not here"]
    have(monkeypatch, 3)
    monkeypatch.setattr(gpus, "_linked", lambda one, other: True)
    assert verdicts(gpus.links(SETTING)) == ["fine"]
    monkeypatch.setattr(gpus, "_linked", lambda one, other: (one, other) != (0, 2))
    assert verdicts(gpus.links(SETTING)) == ["slow"]
    assert "between GPUs 0 and 2" in gpus.links(SETTING)[0].text
