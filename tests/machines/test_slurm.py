"""Slurm on the hosts of a network: which tasks run where, what they see, and how they end."""

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence

import psutil
import pytest

from scripts.processes import wait_until

from . import hosts, slurm
from .conftest import NewNetwork
from .hosts import Host

PATIENCE = 60.0

# To a file, because srun mixes long lines of its tasks.
REPORT = """
import json, os, pathlib
seen = {"host": os.uname().nodename, "interfaces": os.listdir("/sys/class/net"), **os.environ}
pathlib.Path.home().joinpath(f"task-{os.environ['SLURM_PROCID']}.json").write_text(json.dumps(seen))
"""


@pytest.fixture
def nodes(new_network: NewNetwork) -> Iterator[tuple[tuple[Host, ...], Mapping[str, str]]]:
    """Two hosts, and the environment in which ``srun`` runs tasks on them."""
    if reason := slurm.available():
        pytest.skip(f"this machine cannot run Slurm: {reason}")
    both = new_network("node1", "node2")
    with slurm.cluster(both) as environment:
        yield both, environment


def reports(both: Sequence[Host], environment: Mapping[str, str], *options: str) -> list[dict[str, str]]:
    """What the tasks of one ``srun`` on the first host saw, by their rank."""
    done = both[0].run(["srun", *options, sys.executable, "-c", REPORT], environment)
    assert done.returncode == 0, done.stdout
    files = [path for host in both for path in (host.folder / "home").iterdir()]
    return [json.loads(path.read_text()) for path in sorted(files, key=lambda path: path.name)]


def test_one_task_on_each_node(nodes: tuple[tuple[Host, ...], Mapping[str, str]]):
    both, environment = nodes
    seen = reports(both, environment, "--ntasks=2", "--ntasks-per-node=1")
    for rank, (task, host) in enumerate(zip(seen, both, strict=True)):
        assert task["host"] == host.name
        assert host.interface in task["interfaces"]
        assert task["PARALLEL_DIT_RUNTIME"] == host.environment()["PARALLEL_DIT_RUNTIME"]
        expected = {"PROCID": rank, "LOCALID": 0, "NODEID": rank, "NTASKS": 2, "NNODES": 2, "NTASKS_PER_NODE": 1}
        assert {name: int(task[f"SLURM_{name}"]) for name in expected} == expected
        assert task["SLURM_JOB_NODELIST"] == task["SLURM_STEP_NODELIST"] == "node[1-2]"
        assert task["SLURM_LAUNCH_NODE_IPADDR"] == both[0].address
        assert task["SLURMD_NODENAME"] == host.name
        assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} & set(task)


def test_two_tasks_on_each_node(nodes: tuple[tuple[Host, ...], Mapping[str, str]]):
    both, environment = nodes
    seen = reports(both, environment, "--ntasks=4", "--ntasks-per-node=2")
    assert [task["host"] for task in seen] == ["node1", "node1", "node2", "node2"]
    assert [task["SLURM_LOCALID"] for task in seen] == ["0", "1", "0", "1"]
    assert {task["SLURM_TASKS_PER_NODE"] for task in seen} == {"2(x2)"}


def test_ending_srun_ends_the_tasks_of_all_nodes(nodes: tuple[tuple[Host, ...], Mapping[str, str]]):
    both, environment = nodes
    srun = both[0].popen(["srun", "--ntasks=2", "--ntasks-per-node=1", "sleep", "1000"], environment)
    wait_until(lambda: all(sleeping(host) for host in both), PATIENCE, "both tasks run")
    srun.terminate()
    assert srun.wait(PATIENCE) != 0
    wait_until(lambda: not any(sleeping(host) for host in both), PATIENCE, "both tasks have ended")


def test_a_task_that_dies_ends_the_others_if_asked(nodes: tuple[tuple[Host, ...], Mapping[str, str]]):
    both, environment = nodes
    options = ["--ntasks=2", "--ntasks-per-node=1", "--kill-on-bad-exit"]
    srun = both[0].popen(["srun", *options, "sleep", "1000"], environment)
    wait_until(lambda: all(sleeping(host) for host in both), PATIENCE, "both tasks run")
    sleeping(both[1])[0].kill()
    assert srun.wait(PATIENCE) != 0
    wait_until(lambda: not sleeping(both[0]), PATIENCE, "the other task has ended")


def sleeping(host: Host) -> list[psutil.Process]:
    """The tasks on a host."""
    found = []
    for pid in hosts.pids(host):
        with contextlib.suppress(psutil.NoSuchProcess):
            if (process := psutil.Process(pid)).name() == "sleep":
                found.append(process)
    return found
