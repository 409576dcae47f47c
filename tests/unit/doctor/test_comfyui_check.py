"""The check of ComfyUI finds its folder, and what differs from the contract there."""

import subprocess
from pathlib import Path

import pytest

from parallel_backend.doctor.checks import comfyui
from parallel_backend.doctor.finding import Setting
from parallel_backend.errors import InvalidRequest
from tests.unit.doctor.faked_machine import SETTING, verdicts


@pytest.fixture
def checkout(tmp_path) -> Path:
    (tmp_path / "main.py").touch()
    (tmp_path / "comfyui_version.py").write_text('__version__ = "0.27.0"\n')
    return tmp_path


def test_comfyui(monkeypatch, checkout, tmp_path):
    setting = Setting(folder="/none", comfyui=str(checkout))
    monkeypatch.setattr(comfyui, "_contract", lambda path: ("ComfyUI 0.27.0: no differences\n", False))
    assert verdicts(comfyui.comfyui(setting)) == ["fine"]
    differences = "".join(f"difference {number}\n" for number in range(5)) + "5 differences\n"
    monkeypatch.setattr(comfyui, "_contract", lambda path: (differences, True))
    found = comfyui.comfyui(setting)
    assert verdicts(found) == ["broken"]
    assert found[0].text.endswith("difference 0 difference 1 difference 2 (and 2 more)")
    monkeypatch.setattr(comfyui, "CONTRACT", tmp_path / "none")
    assert "not part of this installation" in comfyui.comfyui(setting)[0].text
    (checkout / "comfyui_version.py").write_text('__version__ = "0.3.64"\n')
    assert verdicts(comfyui.comfyui(setting)) == ["broken"]
    with pytest.raises(InvalidRequest, match="it is not a ComfyUI's folder"):
        comfyui.comfyui(Setting(folder="/none", comfyui=str(tmp_path / "none")))


def test_where_comfyui_is(monkeypatch, checkout):
    monkeypatch.setattr(comfyui, "ROOT", checkout / "custom_nodes" / "parallel-dit")
    assert comfyui._find(None) == checkout
    monkeypatch.setattr(comfyui, "ROOT", checkout / "elsewhere" / "parallel-dit")
    assert verdicts(comfyui.comfyui(SETTING)) == ["not here"]


def test_the_contract_of_a_folder_that_lacks_everything(checkout):
    output, differs = comfyui._contract(checkout)
    assert differs
    assert len(output.splitlines()) > 10


def test_a_contract_that_cannot_be_checked(monkeypatch, checkout):
    done = subprocess.CompletedProcess([], 2, stdout="", stderr="a\nNameError: b\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    with pytest.raises(RuntimeError, match="NameError: b"):
        comfyui._contract(checkout)
