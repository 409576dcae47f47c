"""Each check finds what is fine, slow, broken or not here, with its view of the machine faked."""

import importlib.metadata
import os
import resource
import shutil
import stat
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from parallel_backend import processes
from parallel_backend.client import gpus as known_gpus
from parallel_backend.client import query
from parallel_backend.doctor.checks import comfyui, gpus, machine, running, trial, versions
from parallel_backend.doctor.finding import Finding, Setting
from parallel_backend.doctor.registry import CHECKS
from parallel_backend.errors import BackendUnavailable, DeadlineExceeded, InvalidRequest
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.endpoint import Endpoint
from parallel_backend.protocol.model_spec import Devices

SETTING = Setting(folder="/none")
CARD = ["A card", "570.1", "16", "16"]


def verdicts(found: list[Finding]) -> list[str]:
    assert all(finding.text for finding in found)
    assert all(finding.advice for finding in found if finding.verdict in ("slow", "broken"))
    assert {finding.check for finding in found} <= {check.name for check in CHECKS}
    return [finding.verdict for finding in found]


def have(monkeypatch: pytest.MonkeyPatch, count: int, cards: list[list[str]] | None = None) -> None:
    """Let torch see this many GPUs, and nvidia-smi list these."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(known_gpus, "count", lambda: count)
    monkeypatch.setattr(known_gpus, "other_accelerator", lambda: "")
    monkeypatch.setattr(gpus, "_cards", lambda: [CARD] * count if cards is None else cards)
    monkeypatch.setattr(gpus, "_try", lambda index: (f"A card {index}", 78_000_000_000, 80_000_000_000))


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


@pytest.mark.parametrize(
    ("count", "free", "verdict"), [(2, 2e9, "fine"), (2, 5e8, "slow"), (2, 1e7, "broken"), (1, 1e7, "fine")]
)
def test_shared_memory(monkeypatch, count, free, verdict):
    have(monkeypatch, count)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=free, free=free))
    assert verdicts(machine.shared_memory(SETTING)) == [verdict]


@pytest.mark.parametrize(("count", "verdict"), [(2, "broken"), (0, "fine")])
def test_no_shared_memory(monkeypatch, tmp_path, count, verdict):
    have(monkeypatch, count)
    monkeypatch.setattr(machine, "SHARED", tmp_path / "none")
    assert verdicts(machine.shared_memory(SETTING)) == [verdict]


@pytest.mark.parametrize(
    ("files", "verdict"), [((4096, 9999), "fine"), ((-1, -1), "fine"), ((512, 512), "slow"), ((100, 9999), "broken")]
)
def test_open_files(monkeypatch, files, verdict):
    limits = {resource.RLIMIT_NOFILE: files, resource.RLIMIT_MEMLOCK: (-1, -1)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    assert verdicts(machine.limits(SETTING)) == [verdict, "fine"]


def test_locked_memory_matters_with_infiniband(monkeypatch, tmp_path):
    limits = {resource.RLIMIT_NOFILE: (4096, 4096), resource.RLIMIT_MEMLOCK: (65536, 65536)}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)
    for folder, verdict in ((tmp_path, "slow"), (tmp_path / "none", "fine")):
        monkeypatch.setattr(machine, "_INFINIBAND", folder)
        assert verdicts(machine.limits(SETTING)) == ["fine", verdict]


@pytest.mark.parametrize(("free", "verdict"), [(5e9, "fine"), (3e9, "slow"), (5e8, "broken")])
@pytest.mark.parametrize("limited", [True, False])
def test_memory(monkeypatch, free, verdict, limited):
    monkeypatch.setattr(processes, "machine_memory", lambda: (int(free), 64_000_000_000))
    monkeypatch.setattr(machine, "limited_groups", lambda: ("a group",) if limited else ())
    found = machine.memory(SETTING)
    assert verdicts(found) == [verdict]
    assert ("control group" in found[0].text) == limited


@pytest.fixture
def endpoint(monkeypatch, tmp_path) -> Endpoint:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("PARALLEL_DIT_RUNTIME", str(folder))
    monkeypatch.delenv("PARALLEL_DIT_LOGS", raising=False)
    return Endpoint.default()


def test_runtime_folder(monkeypatch, endpoint):
    assert verdicts(running.runtime_folder(SETTING)) == ["fine"]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5_000_000))
    assert verdicts(running.runtime_folder(SETTING)) == ["slow"]
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "is not writable" in running.runtime_folder(SETTING)[0].text
    endpoint.folder.chmod(0o755)
    with pytest.raises(BackendUnavailable, match="with mode 0700"):
        running.runtime_folder(SETTING)


@pytest.mark.parametrize("name", ["socket", "logs", "logs/rank0.log.1"])
def test_others_may_not_read(endpoint, name):
    path = endpoint.folder / name
    endpoint.logs.mkdir(mode=0o700)
    if name != "logs":
        path.touch()
    path.chmod(0o755)
    found = running.runtime_folder(SETTING)
    assert verdicts(found) == ["broken"]
    assert f"{path} (mode 0755)" in found[0].text
    path.chmod(stat.S_IRWXU)
    assert verdicts(running.runtime_folder(SETTING)) == ["fine"]


def status(problem: str) -> SimpleNamespace:
    return SimpleNamespace(pid=1, state="idle", ranks=(), generation=2, log_problem=problem, logs="/logs")


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        (status(""), "fine"),
        (BackendUnavailable("no backend answers"), "fine"),
        (status("3 lines are missing: No space left on device"), "slow"),
        (DeadlineExceeded("it accepted no connection within 20 s"), "broken"),
    ],
)
def test_backend(monkeypatch, endpoint, answer, verdict):
    def ask(_: Endpoint) -> object:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(query, "status", ask)
    assert verdicts(running.backend(SETTING)) == [verdict]


def test_packages(monkeypatch, tmp_path):
    assert verdicts(versions.packages(SETTING)) == ["fine"]
    wanted = tmp_path / "requirements.txt"
    wanted.write_text("torch>=2.7\nmsgspec>=99\nno-such-package\n# a comment\n\n")
    monkeypatch.setattr(versions, "REQUIREMENTS", wanted)
    found = versions.packages(SETTING)
    assert verdicts(found) == ["broken"]
    version = importlib.metadata.version("msgspec")
    assert found[0].text.endswith(f"; msgspec {version} is not >=99; no-such-package is missing")


def test_kernels(monkeypatch):
    have(monkeypatch, 0)
    found = versions.kernels(SETTING)
    assert verdicts(found) == ["fine"]
    assert found[0].text == "sdpa runs here"
    have(monkeypatch, 1)
    refusals = {"sdpa": None, "flash": None, "sage": "it is older than 2"}
    monkeypatch.setattr(versions, "_refusals", lambda: refusals)
    monkeypatch.setattr(versions, "_installed", lambda package: False)
    assert verdicts(versions.kernels(SETTING)) == ["fine"]
    monkeypatch.setattr(versions, "_installed", lambda package: True)
    assert verdicts(versions.kernels(SETTING)) == ["slow"]
    assert "sageattention: it is older than 2" in versions.kernels(SETTING)[0].text


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


@pytest.mark.parametrize(("measured", "verdict"), [((1e-3, 1e9), "fine"), ((9e-3, 1e9), "slow"), ((1e-3, 1e8), "slow")])
def test_exchange(monkeypatch, measured, verdict):
    have(monkeypatch, 0)
    monkeypatch.setattr(trial, "_measure", lambda folder, devices: measured)
    assert verdicts(trial.exchange(SETTING)) == [verdict]


@pytest.mark.parametrize(("error", "verdict"), [(1e-6, "fine"), (2e-4, "broken"), (float("nan"), "broken")])
def test_forward(monkeypatch, error, verdict):
    have(monkeypatch, 0)
    monkeypatch.setattr(trial, "_difference", lambda folder, devices: error)
    assert verdicts(trial.forward(SETTING)) == [verdict]


def test_devices_of_the_trials(monkeypatch):
    seen = 3
    monkeypatch.setattr(known_gpus, "count", lambda: seen)
    monkeypatch.setattr("parallel_backend.client.devices.gpu_count", lambda: seen)
    monkeypatch.setenv("PARALLEL_DIT_COLLECTIVES", "")
    assert trial._devices(SETTING).indices == (0, 1)
    assert trial._devices(Setting(folder="", devices="2,1")).indices == (2, 1)
    seen = 1
    one = trial._devices(SETTING)
    assert (one.kind, one.indices, one.collectives) == ("cuda", (0, 0), "gloo")
    seen = 0
    assert trial._devices(SETTING) == Devices(kind="cpu", indices=(0, 1))


def test_a_forward_that_differs_is_found(monkeypatch, tmp_path):
    class Wrong:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def call(self, message, inputs):
            whole = inputs["0.hidden_states"]
            return {"0": whole + 0.01 * whole.abs().max() * (message.model.layout != ParallelLayout())}

    monkeypatch.setattr(trial, "temporary_backend", lambda folder: Wrong())
    assert trial._difference(tmp_path, Devices(kind="cpu", indices=(0, 1))) == pytest.approx(0.01, rel=1e-3)
