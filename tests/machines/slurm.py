"""A Slurm cluster whose nodes are the hosts of a test network.

The first host runs the controller, every host one node daemon, all as root and all from one folder that goes with the
network. Each host has a munge daemon, because one takes a credential only once, and Slurm sends one to several nodes.
"""

import contextlib
import secrets
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from parallel_backend.errors import DeadlineExceeded
from scripts.processes import wait_until

from .hosts import Host

START_SECONDS = 60.0
SOCKET = "munge.socket"
TOOLS = ("munged", "slurmctld", "slurmd", "srun", "sinfo")

CONFIGURATION = """
ClusterName=machines
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={socket}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
TaskProlog={folder}/task_prolog
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
ReturnToService=2
MpiDefault=none
"""


def available() -> str:
    """Why this machine cannot run a Slurm cluster, or an empty string."""
    missing = [name for name in TOOLS if shutil.which(name) is None]
    return f"not installed: {', '.join(missing)} (Debian: slurmctld slurmd slurm-client munge)" if missing else ""


@contextlib.contextmanager
def cluster(hosts: Sequence[Host], processors: int = 8) -> Iterator[Mapping[str, str]]:
    """Start Slurm on the hosts, and yield the environment with which ``srun`` and others find it.

    Args:
        hosts: the nodes, called like them.
        processors: how many each node claims to have, whatever the machine has.
    """
    folder = hosts[0].folder.parent / "slurm"
    environment = {"SLURM_CONF": str(folder / "slurm.conf")}
    daemons: list[subprocess.Popen[str]] = []
    try:
        _configure(folder, hosts, processors)
        daemons += [_start_munge(host, folder) for host in hosts]
        wait_until(lambda: all((host.folder / SOCKET).exists() for host in hosts), START_SECONDS, "munge listens")
        daemons.append(_start(hosts[0], folder, environment, ["slurmctld", "-D"]))
        daemons += [_start(host, folder, environment, ["slurmd", "-D"]) for host in hosts]
        _wait_until_idle(hosts, folder, environment)
        yield environment
    finally:
        for daemon in daemons:
            daemon.kill()
            daemon.wait(START_SECONDS)


def _configure(folder: Path, hosts: Sequence[Host], processors: int) -> None:
    (folder / "state").mkdir(parents=True)
    for host in hosts:
        (folder / f"spool-{host.name}").mkdir()
    (folder / "task_prolog").write_text(_task_prolog(hosts))
    (folder / "task_prolog").chmod(0o755)
    controller = f"SlurmctldHost={hosts[0].name}({hosts[0].address})"
    nodes = [f"NodeName={host.name} NodeAddr={host.address} CPUs={processors} State=UNKNOWN" for host in hosts]
    partition = "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP"
    text = CONFIGURATION.format(folder=folder, socket=hosts[0].here / SOCKET)
    (folder / "slurm.conf").write_text("\n".join([text, controller, *nodes, partition, ""]))


def _task_prolog(hosts: Sequence[Host]) -> str:
    """A script whose output gives each task the variables of its own host: srun passes on those of the host it ran on.

    Real nodes share their names and not their files. These share the files, and so must not share the names.
    """
    lines = ["#!/bin/sh", 'case "$SLURMD_NODENAME" in']
    for host in hosts:
        exports = [f"export {name}={value}" for name, value in host.environment().items()]
        lines.append(f"{host.name}) printf '%s\\n' {shlex.join(exports)} ;;")
    return "\n".join([*lines, "esac", ""])


def _start_munge(host: Host, folder: Path) -> "subprocess.Popen[str]":
    key = folder / "munge.key"
    if not key.exists():
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
    files = {"socket": SOCKET, "log-file": "munge.log", "pid-file": "munge.pid", "seed-file": "munge.seed"}
    options = [f"--{option}={host.here / name}" for option, name in files.items()]
    # More threads than the two by default, as Slurm asks for: all of its calls that are under way need one.
    return _start(host, folder, {}, ["munged", "--foreground", "--num-threads=10", f"--key-file={key}", *options])


def _start(host: Host, folder: Path, environment: Mapping[str, str], command: list[str]) -> "subprocess.Popen[str]":
    with open(folder / f"{command[0]}-{host.name}.log", "w") as log:
        return host.popen(command, environment, output=log)


def _wait_until_idle(hosts: Sequence[Host], folder: Path, environment: Mapping[str, str]) -> None:
    expected = sorted(f"{host.name} idle" for host in hosts)

    def idle() -> bool:
        listed = hosts[0].run(["sinfo", "--noheader", "--Node", "--format=%N %T"], environment)
        return sorted(line.strip() for line in listed.stdout.splitlines()) == expected

    try:
        wait_until(idle, START_SECONDS, "Slurm's nodes are idle")
    except DeadlineExceeded as error:
        logs = [f"{log.name}:\n{log.read_text()[-2000:]}" for log in sorted(folder.glob("*.log"))]
        raise RuntimeError("\n".join(logs)) from error
