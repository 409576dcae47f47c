"""The checks of the machine, the backend and the packages find what is fine, slow or broken, with their view faked."""

import importlib.metadata
import os
import resource
import shutil
import stat
import sys
from types import SimpleNamespace

import pytest

from parallel_backend import packages, processes
from parallel_backend.client import query
from parallel_backend.doctor.checks import machine, running, versions
from parallel_backend.errors import BackendUnavailable, DeadlineExceeded
from parallel_backend.protocol.endpoint import Endpoint
from parallel_backend.rank import spare
from tests.support import broken_packages
from tests.unit.doctor.faked_machine import SETTING, have, verdicts


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


def test_a_backend_on_another_machine(monkeypatch, tmp_path):
    """Nothing of this machine's runtime folder matters, and that it does not answer is an error."""
    monkeypatch.setenv("PARALLEL_DIT_RUNTIME", str(tmp_path / "none"))
    monkeypatch.setenv("PARALLEL_DIT_CERTIFICATES", str(tmp_path / "none"))
    monkeypatch.setenv("PARALLEL_DIT_BACKEND", "127.0.0.1:1")
    (found,) = running.runtime_folder(SETTING)
    assert (found.verdict, found.text) == ("not here", "the backend is on another machine, at 127.0.0.1:1")
    assert verdicts(running.backend(SETTING)) == ["broken"]
    monkeypatch.setattr(query, "status", lambda endpoint: (_ for _ in ()).throw(BackendUnavailable("no answer")))
    assert verdicts(running.backend(SETTING)) == ["broken"]
    assert not (tmp_path / "none").exists()


@pytest.mark.long
def test_packages(monkeypatch, tmp_path):
    monkeypatch.setattr(packages, "hide", lambda: None)  # this process needs some of them
    assert verdicts(versions.packages(SETTING)) == ["fine"]
    wanted = tmp_path / "requirements.txt"
    wanted.write_text("torch>=2.7\nmsgspec>=99\nno-such-package\n# a comment\n\n")
    monkeypatch.setattr(packages, "REQUIREMENTS", wanted)
    found = versions.packages(SETTING)
    assert verdicts(found) == ["broken"]
    version = importlib.metadata.version("msgspec")
    assert found[0].text.endswith(f"; msgspec {version} is not >=99; no-such-package is missing")


def test_a_broken_package(monkeypatch, tmp_path):
    monkeypatch.setattr(packages, "hide", lambda: None)
    monkeypatch.setattr(spare, "imports", lambda: iter(()))
    monkeypatch.setattr(versions, "_SOME_MODELS", ("torchsde", "gguf"))
    for module in [name for name in sys.modules if name.partition(".")[0] == "gguf"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.syspath_prepend(str(broken_packages.write(tmp_path, ["gguf"], version="0.1", errors=("OSError",))))
    monkeypatch.setattr(versions, "_unmet", list)
    (found,) = versions.packages(SETTING)
    assert found.verdict == "broken"
    assert "the package gguf 0.1 cannot be imported (OSError: gguf does not work here): run " in found.text


def test_packages_that_ranks_do_without(monkeypatch, tmp_path):
    broken_packages.write(tmp_path, ["peft"], version="0.12.0", errors=("RuntimeError",))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(versions, "_OTHERS", ("peft", "no_such_package", "einops"))
    (found,) = versions.other_packages(SETTING)
    assert found.verdict == "fine"
    assert found.text.startswith("ranks do without peft 0.12.0, einops ")
    assert "cannot be imported here, which other nodes may notice: peft 0.12.0 (RuntimeError: peft does" in found.text


def test_kernels(monkeypatch):
    have(monkeypatch, 0)
    found = versions.kernels(SETTING)
    assert verdicts(found) == ["fine"]
    assert found[0].text == "sdpa runs here"
    have(monkeypatch, 1)
    refusals = {"sdpa": None, "flash": None, "sage": "it is older than 2"}
    monkeypatch.setattr(versions, "_refusals", lambda: refusals)
    monkeypatch.setattr(packages, "is_installed", lambda package: False)
    assert verdicts(versions.kernels(SETTING)) == ["fine"]
    monkeypatch.setattr(packages, "is_installed", lambda package: True)
    assert verdicts(versions.kernels(SETTING)) == ["slow"]
    assert "sageattention: it is older than 2" in versions.kernels(SETTING)[0].text
