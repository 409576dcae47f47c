"""Starts the processes of ranks and of spare ranks."""

import contextlib
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ... import env
from ...inherited import inherited, number_of_threads
from ...processes import die_with_parent
from ...protocol import rank_control
from ...protocol.model_spec import FIRST, VISIBLE, Collectives, Devices
from .process import LocalProcess, Process

THREADS, COMPILERS = "OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"
_MOST_COMPILERS = 32
"""Of one rank, as torch has it."""
GLOO_INTERFACE, NCCL_INTERFACE = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
CHANGEABLE = frozenset((THREADS, COMPILERS, GLOO_INTERFACE, NCCL_INTERFACE))
"""Variables that a spare rank can change: those that a new process group reads, and the numbers of threads and of
processes that compile."""
_ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


@dataclass(frozen=True, kw_only=True)
class StartedProcess:
    """A process that this process started.

    Attributes:
        process: the process.
        control: the supervisor's end of its control socket.
        pidfd: becomes readable when the process exits.
    """

    process: Process
    control: socket.socket
    pidfd: int


def start_process(
    command: Sequence[str], *, environment: Mapping[str, str], output: int, pass_fds: Sequence[int] = ()
) -> StartedProcess:
    """Start a process; ``--control-fd`` and its control socket are added to its command.

    Raises:
        OSError: it does not start.
    """
    ours, theirs = rank_control.pair()
    with theirs:
        try:
            process = subprocess.Popen(
                [*command, "--control-fd", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno(), *pass_fds],
                env=environment,
                # A spare rank may be suspended before its first line. Safe beside other threads: one call of libc.
                preexec_fn=die_with_parent,
            )
        except OSError:
            ours.close()
            raise
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError:  # no descriptor is left: nothing would end this process later
        process.kill()
        process.wait()
        ours.close()
        raise
    return StartedProcess(process=LocalProcess(process), control=ours, pidfd=pidfd)


def adopt(
    spare: StartedProcess,
    *,
    device: str,
    collectives: Collectives,
    common: Mapping[str, str],
    own: Mapping[str, str],
    output: int,
    store: int | None = None,
) -> None:
    """Make a spare rank a rank.

    Args:
        spare: its process. If it has just died, its set notices that like the death of any rank.
        device: PyTorch's name of its device.
        collectives: the communication backend of GPU ranks.
        common: see ``common_environment``.
        own: the rank's own variables.
        output: takes its output.
        store: the listening socket for the store of rank 0.
    """
    spare.process.was_spare = True
    environment = {**own, **{name: common[name] for name in CHANGEABLE}}
    message = rank_control.Become(device=device, collectives=collectives, environment=environment)
    descriptors = [output] if store is None else [output, store]
    with contextlib.suppress(OSError):
        rank_control.send(spare.control, message, descriptors=descriptors)


class NotStarted(OSError):
    """Ranks do not start.

    Attributes:
        ranks: their numbers.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks


def common_environment(devices: Devices, *, interface: str = "") -> dict[str, str]:
    """Return the common environment of all ranks on this host.

    Args:
        devices: all ranks'. This host is the first one.
        interface: the network interface to ranks of other hosts; "" without other hosts.
    """
    share = max(1, len(os.sched_getaffinity(0)) // devices.on_host(FIRST))
    environment = {
        **inherited(os.environ),
        THREADS: str(number_of_threads(os.environ.get(THREADS, "")) or share),
        # Without it, each rank would start as many processes as there are cores.
        COMPILERS: str(number_of_threads(os.environ.get(COMPILERS, "")) or min(share, _MOST_COMPILERS)),
        # Replaces inherited values, which may be for another machine. NCCL takes a plain name as a prefix of several
        # names.
        GLOO_INTERFACE: interface or "lo",
        NCCL_INTERFACE: f"={interface}" if interface else "lo",
    }
    if devices.kind == "cuda":
        for name in VISIBLE:
            _set_or_remove(environment, name, dict(devices.visible).get(name))
    # ComfyUI selects this allocator for its own process; ranks that inherit it run out of memory under NCCL.
    for name in environment.keys() & set(_ALLOCATORS):
        options = [option for option in environment[name].split(",") if option.strip() != "backend:cudaMallocAsync"]
        _set_or_remove(environment, name, ",".join(options) or None)
    return environment


def own_environment(rank: int, devices: Devices) -> dict[str, str]:
    """Return each rank's own variables on these devices, without ``store_environment``."""
    host = devices.host_of(rank)
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(devices.indices)),
        "LOCAL_RANK": str(sum(devices.host_of(other) == host for other in range(rank))),
        "LOCAL_WORLD_SIZE": str(devices.on_host(host)),
    } | ({env.HOST.name: host} if host != FIRST else {})


def store_environment(port: int) -> dict[str, str]:
    """Return the variables with the store's address: this port of the loopback interface, on every host."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _set_or_remove(environment: dict[str, str], name: str, value: str | None) -> None:
    """Set a variable, or remove it if ``value`` is None."""
    environment.pop(name, None)
    if value is not None:
        environment[name] = value
