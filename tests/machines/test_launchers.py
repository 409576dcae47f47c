"""Launchers start one process a host, from which a backend over all of them comes to be."""

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from scripts.processes import wait_until

from . import slurm
from .backend import PYTHON, Backend
from .conftest import NewNetwork
from .hosts import Host, pids
from .run import SECONDS, Run, close

JOB = (
    "RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS MASTER_ADDR={address} exec {python} -m parallel_backend host "
    "--interface $(ls /sys/class/net | grep -v ^lo$)"
)
"""What ``srun`` runs on each node. The interface has another name on each here."""


def backend_over(hosts: Sequence[Host], folder: Path) -> Backend:
    """A backend of which nothing has started yet."""
    backend = Backend(hosts=hosts, certificates=folder / "certificates")
    first = hosts[0]
    backend.command(first, "certificates", "--hosts", f"{first.address},{first.name}")
    return backend


def works(backend: Backend, model: Path, folder: Path, name: str) -> bool:
    """Whether all hosts together give what the first one gives."""
    first = backend.hosts[0]
    one = Run(backend, first, model, folder / f"{name} one.safetensors", "0", "", "3").samples()
    run = Run(backend, first, model, folder / f"{name} all.safetensors", "0,0@" + backend.hosts[1].name, "", "3")
    return close(run.samples(), one)


def torchrun(backend: Backend, number: int) -> "subprocess.Popen[str]":
    """Start torchrun on one host."""
    host = backend.hosts[number]
    layout = ["--nnodes", str(len(backend.hosts)), "--nproc-per-node", "1", "--node-rank", str(number)]
    meet = ["--rdzv-backend", "static", "--master-addr", backend.hosts[0].address, "--master-port", "29500"]
    program = ["--max-restarts", "3", "-m", "parallel_backend", "host", "--interface", host.interface]
    command = [PYTHON, "-m", "torch.distributed.run", *layout, *meet, *program]
    return host.popen(command, backend.environment(), output=backend.log(host, "torchrun").open("w"))


def test_torchrun(new_network: NewNetwork, model: Path, tmp_path: Path) -> None:
    backend = backend_over(new_network("alpha", "beta"), tmp_path)
    agents = [torchrun(backend, number) for number in range(2)]
    backend.wait_for(["joined", "joined"])
    assert works(backend, model, tmp_path, "torchrun")
    # What ends this host's process is the launcher's to start again; the backend goes on with it.
    beta = backend.hosts[1]
    [worker] = [pid for pid in pids(beta) if "parallel_backend\0host" in command_line(pid)]
    os.kill(worker, signal.SIGKILL)
    wait_until(lambda: backend.status()["hosts"][1]["state"] == "lost", SECONDS, "the host is lost")
    backend.wait_for(["joined", "joined"])
    assert works(backend, model, tmp_path, "again")
    for agent in agents:
        agent.terminate()
    wait_until(lambda: not pids(backend.hosts[0]) and not pids(beta), SECONDS, "nothing is left")


def command_line(pid: int) -> str:
    """The words of a process's command, each ended by a NUL; "" if it is gone."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""
    return "" if "torch.distributed.run" in words else words


def test_srun(new_network: NewNetwork, model: Path, tmp_path: Path) -> None:
    if reason := slurm.available():
        pytest.skip(f"this machine cannot run Slurm: {reason}")
    nodes = new_network("node1", "node2")
    with slurm.cluster(nodes) as environment:
        backend = backend_over(nodes, tmp_path)
        job = start_job(backend, environment)
        backend.wait_for(["joined", "joined"])
        assert works(backend, model, tmp_path, "srun")
        job.terminate()

        def ended() -> bool:
            return not any("parallel_backend" in command_line(pid) for node in nodes for pid in pids(node))

        wait_until(ended, SECONDS, "the job has ended")


def start_job(backend: Backend, environment: Mapping[str, str]) -> "subprocess.Popen[str]":
    """Start one process on each node with ``srun``."""
    first = backend.hosts[0]
    script = JOB.format(address=first.address, python=PYTHON)
    options = ["--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1"]
    return first.popen(
        ["srun", *options, "bash", "-c", script], backend.environment(**environment),
        output=backend.log(first, "srun").open("w"),
    )  # fmt: skip


def test_several_processes_a_host_are_refused(new_network: NewNetwork, tmp_path: Path) -> None:
    backend = backend_over(new_network("alpha"), tmp_path)
    (alpha,) = backend.hosts
    variables = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.1.1.1"}
    command = [PYTHON, "-m", "parallel_backend", "host", "--interface", alpha.interface]
    done = alpha.run(command, backend.environment(**variables))
    assert done.returncode == 1
    assert done.stdout.startswith("LOCAL_WORLD_SIZE=2: one process starts all ranks of its host, so --nproc-per-node 1")
