"""Checks run one after another, whatever each of them does."""

import time
from pathlib import Path

import psutil
import pytest

from parallel_backend.doctor import runner
from parallel_backend.doctor.finding import Check, Setting
from parallel_backend.doctor.runner import CHILD_LOG, examine


def check(name: str, seconds: float = 60.0) -> Check:
    return Check(name=name, target=f"tests.unit.doctor.fake_checks:{name}", seconds=seconds)


def test_no_check_stops_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runner, "_END", 0.5)
    names = ["fine", "raises", "refuses", "dies", "fine", "leaves", "nowhere", "fine"]
    found = [one for [one] in examine([check(name) for name in names], Setting(folder=str(tmp_path), comfyui="this"))]
    assert [one.verdict for one in found] == ["fine", *["broken"] * 3, "fine", *["broken"] * 2, "fine"]
    assert [one.check for one in found] == names
    texts = [one.text for one in found]
    assert texts[1] == "KeyError: 'what is missing'"
    assert texts[2] == "a sentence for the user"
    assert texts[3] == "the process that checked it was killed by SIGSEGV"
    assert texts[5] == "the process that checked it exited with status 3"
    assert texts[6].startswith("AttributeError: ")
    assert all(one.advice for one in found if one.verdict == "broken")
    assert "said this" in (tmp_path / CHILD_LOG).read_text()


def test_a_check_that_hangs_is_ended_at_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runner, "_END", 0.5)
    start = time.monotonic()
    found = [one for [one] in examine([check("hangs", 3.0), check("fine")], Setting(folder=str(tmp_path)))]
    assert found[0].text == "it did not end within 3 s"
    assert found[1].verdict == "fine"
    assert time.monotonic() - start < 30.0
    assert not [child for child in psutil.Process().children() if "doctor.child" in " ".join(child.cmdline())]


def test_a_caller_that_stops_early_leaves_no_process(tmp_path: Path):
    examined = examine([check("fine"), check("hangs")], Setting(folder=str(tmp_path)))
    [found] = next(examined)
    examined.close()
    assert not psutil.pid_exists(int(found.text))
