"""Process helpers, the control socket, the devices of a request, and hang detection."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import msgspec
import psutil
import pytest

from parallel_backend import processes
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol import rank_control
from parallel_backend.protocol.messages import Trial
from parallel_backend.protocol.model_spec import VISIBLE, Devices, ModelSpec
from parallel_backend.protocol.status import RankStatus
from parallel_backend.supervisor.event_loop import EventLoop
from parallel_backend.supervisor.limits import Patience
from parallel_backend.supervisor.log_files import LogFiles
from parallel_backend.supervisor.ranks.process import Process
from parallel_backend.supervisor.ranks.rank_process import RankProcess
from parallel_backend.supervisor.ranks.rank_set import RankSet
from parallel_backend.supervisor.ranks.rank_start import common_environment
from parallel_backend.supervisor.request_queue import devices_for


def test_memory_and_activity_of_a_process() -> None:
    measured, known = processes.resident_memory(os.getpid()), psutil.Process().memory_info().rss
    assert abs(measured - known) < 0.1 * known
    activity = processes.activity(os.getpid())
    assert activity is not None
    assert "R" in activity.states
    assert activity.busy
    assert activity.cpu_ticks > 0


@pytest.mark.parametrize(
    ("ranks", "threads", "wanted"), [(1, 1, [{0, 1, 7}]), (2, 1, [{0}, {1, 7}]), (2, 2, []), (9, 1, [])]
)
def test_ranks_stay_on_their_share_of_the_cores(monkeypatch, ranks, threads, wanted):
    """Unless there are fewer cores than threads of ranks."""
    affinities: list[set[int]] = []
    monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 7})
    monkeypatch.setattr(processes, "_core_position", lambda cpu: (0, cpu, cpu))
    monkeypatch.setattr(os, "listdir", lambda _: ["7"])
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: affinities.append(set(cores)))
    for rank in range(ranks):
        processes.pin_to_core_share(rank, ranks)
    assert affinities == wanted


def test_the_activity_of_a_stopped_and_of_a_gone_process() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    activity = processes.activity(process.pid)
    assert activity is not None
    assert activity.states == {"T"}
    assert not activity.busy
    assert not processes.wait_for_exit(process.pid, 0.05)
    processes.send_signal(process.pid, signal.SIGKILL)
    assert processes.wait_for_exit(process.pid, 5.0)
    assert processes.describe_exit(process.wait(5)) == "was killed by SIGKILL"
    assert processes.activity(process.pid) is None
    assert processes.resident_memory(process.pid) == 0
    assert processes.wait_for_exit(process.pid, 0.0)


def test_no_group_is_ever_signalled() -> None:
    processes.send_signal(0, signal.SIGKILL)


def test_a_descriptor_travels_with_its_message() -> None:
    ours, theirs = rank_control.pair()
    near, far = socket.socketpair()
    with ours, theirs, near:
        header = msgspec.json.encode({"text": "x" * (rank_control.MAX_DATAGRAM - 5000)})
        rank_control.send(ours, rank_control.Run(header=msgspec.Raw(header)), descriptors=[far.fileno()])
        far.close()
        message, (descriptor,) = rank_control.receive(theirs, rank_control.ToRank)
        assert bytes(message.header) == header
        assert not os.get_inheritable(descriptor)
        with socket.socket(fileno=descriptor) as passed:
            passed.sendall(b"hello")
        assert near.recv(10) == b"hello"
        assert near.recv(10) == b""
        with pytest.raises(BlockingIOError):
            rank_control.receive(theirs, rank_control.ToRank)
    with pytest.raises(OSError, match="closed"):
        _closed_pair()


def _closed_pair() -> None:
    ours, theirs = rank_control.pair()
    ours.close()
    with theirs:
        rank_control.receive(theirs, rank_control.ToRank)


VISIBLE_HERE = (("CUDA_VISIBLE_DEVICES", "7,6,5,4"),)


def test_a_request_needs_the_devices_of_its_layout() -> None:
    devices = Devices(kind="cuda", indices=(3, 1, 2), visible=VISIBLE_HERE, collectives="gloo")
    assert devices_for(Trial(name="echo", model=ModelSpec(path="/", devices=devices))) == devices
    spec = ModelSpec(path="/", devices=devices, layout=ParallelLayout(ulysses=2))
    assert devices_for(Trial(name="echo", model=spec)) == replace(devices, indices=(3, 1))


def rank_set(folder: Path, devices: Devices) -> RankSet:
    return RankSet(
        generation=1,
        devices=devices,
        logs=LogFiles(folder),
        command=(),
        patience=Patience(),
        events=EventLoop(),
        on_finished=lambda rank, finished: None,
    )


ASLEEP, STARVED = frozenset("S"), frozenset("SR")


@pytest.mark.parametrize(
    ("states", "checks", "hangs"),
    [
        (ASLEEP, [1, 2, 3, 4, 5, 6, 7, 8], False),
        (ASLEEP, [1, 2, 3, 4, 5, 6, 7, 8, 9], True),
        (STARVED, range(1, 120), False),  # other processes have the cores
        (STARVED, range(1, 122), True),
        (ASLEEP, [1, 300, 301, 302, 303, 304, 305, 306], False),  # the machine was suspended
        (ASLEEP, [1, 2, 3, 300, 301, 302, 303, 304], False),
        (ASLEEP, [1, 2, 3, *range(300, 307)], True),
    ],
)
def test_a_rank_that_could_run_and_does_not_is_hung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, states: frozenset[str], checks: Sequence[int], hangs: bool
) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    ranks = rank_set(tmp_path, Devices(kind="cpu", indices=(0,)))
    ranks._outputs[0] = ranks._open_output(0)
    activity = processes.Activity(states=states, cpu_ticks=7)
    process = cast(Process, SimpleNamespace(pid=1, host="", returncode=None, activity=lambda: activity))
    with socket.socket() as control_socket:
        status = RankStatus(rank=0, pid=1, device="cpu", memory=0)
        ranks.ranks.append(
            RankProcess(
                rank=0, process=process, control=control_socket, pidfd=0, status=status, ready=True, last_heard=0.0
            )
        )
        for clock[0] in checks:
            assert not ranks._failures
            ranks._check_for_hangs()
    assert bool(ranks._failures) == hangs


def test_ranks_serve_their_first_devices_and_no_others(tmp_path: Path) -> None:
    devices = Devices(kind="cuda", indices=(3, 1, 2), visible=VISIBLE_HERE, collectives="gloo")
    ranks = rank_set(tmp_path, devices)
    assert ranks.covers(devices)
    assert ranks.covers(replace(devices, indices=(3, 1)))
    for other in ({"indices": (1, 2)}, {"visible": ()}, {"collectives": "nccl"}, {"indices": (3, 1, 2, 0)}):
        assert not ranks.covers(replace(devices, **other))


def test_ranks_see_the_gpus_of_the_process_that_counted_them_and_not_the_supervisors(monkeypatch) -> None:
    for name in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
        monkeypatch.setenv(name, "of the ComfyUI that started the supervisor")
    visible = (("CUDA_DEVICE_ORDER", "PCI_BUS_ID"), ("HIP_VISIBLE_DEVICES", "2,3"))
    environment = common_environment(Devices(kind="cuda", indices=(0, 1), visible=visible))
    assert {name: environment[name] for name in VISIBLE if name in environment} == dict(visible)
    environment = common_environment(Devices(kind="cuda", indices=(0, 1)))
    assert not environment.keys() & set(VISIBLE)
