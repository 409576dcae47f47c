"""What the backend's processes inherit of ComfyUI's environment."""

import os

import pytest

from parallel_backend.inherited import inherited, number_of_threads
from parallel_backend.protocol.model_spec import Devices
from parallel_backend.supervisor.ranks import rank_start

TWO = Devices(kind="cpu", indices=(0, 1))


@pytest.mark.parametrize(
    "name",
    ["DIFFUSERS_ATTN_BACKEND", "DIFFUSERS_SLOW_IMPORT", "USE_TF", "USE_TORCH", "HF_ENABLE_PARALLEL_LOADING",
     "PYTHONOPTIMIZE", "PYTHONWARNINGS", "PYTHONINSPECT", "NCCL_COMM_ID", "GLOO_DEVICE_TRANSPORT"],
)  # fmt: skip
def test_what_is_left_out(name):
    assert inherited({name: "1", "HF_HOME": "/models", "NCCL_DEBUG": "INFO"}) == {
        "HF_HOME": "/models", "NCCL_DEBUG": "INFO",
    }  # fmt: skip


def test_relative_folders_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = os.pathsep.join(["libs", "", "/there", "../beside"])
    expected = os.pathsep.join([str(tmp_path / "libs"), "/there", str(tmp_path.parent / "beside")])
    assert inherited({"PYTHONPATH": path}) == {"PYTHONPATH": expected}
    assert inherited({"PYTHONPATH": os.pathsep}) == {}


def test_another_python_has_another_home():
    assert inherited({"PYTHONHOME": "/a"}) == {"PYTHONHOME": "/a"}
    assert "PYTHONHOME" not in inherited({"PYTHONHOME": "/a", "PARALLEL_DIT_PYTHON": "/b/bin/python"})


@pytest.mark.parametrize(("value", "kept"), [("DETAIL", True), ("OFF", True), ("garbage", False), ("", False)])
def test_levels_that_torch_refuses_are_left_out(value, kept):
    assert bool(inherited({"TORCH_DISTRIBUTED_DEBUG": value})) == kept


@pytest.mark.parametrize(
    ("text", "number"), [("3", 3), (" 4,2", 4), ("", None), ("0", None), ("-1", None), ("many", None), ("²", None)]
)
def test_threads(text, number):
    assert number_of_threads(text) == number


def test_ranks_of_one_machine_talk_over_loopback_whatever_the_environment_says(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "of_another_machine")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "of_another_machine")
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    found = rank_start.common_environment(TWO)
    assert (found["GLOO_SOCKET_IFNAME"], found["NCCL_SOCKET_IFNAME"]) == ("lo", "lo")
    assert found["OMP_NUM_THREADS"] == str(max(1, len(os.sched_getaffinity(0)) // 2))
    several = rank_start.common_environment(TWO, interface="eth7")
    assert (several["GLOO_SOCKET_IFNAME"], several["NCCL_SOCKET_IFNAME"]) == ("eth7", "=eth7")


@pytest.mark.parametrize(
    ("cores", "ranks", "said", "expected"),
    [(64, 8, None, "8"), (2, 8, None, "1"), (256, 1, None, "32"), (64, 8, "", "8"), (64, 8, "many", "8"),
     (64, 8, "40", "40")],
)  # fmt: skip
def test_ranks_share_the_cores_for_processes_that_compile(monkeypatch, cores, ranks, said, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    if said is not None:
        monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", said)
    found = rank_start.common_environment(Devices(kind="cpu", indices=tuple(range(ranks))))
    assert found["TORCHINDUCTOR_COMPILE_THREADS"] == expected
    assert found["OMP_NUM_THREADS"] == str(max(1, cores // ranks))
