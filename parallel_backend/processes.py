"""Query and control processes through the kernel: memory, activity, exit status, signals and CPU affinity (Linux)."""

import contextlib
import ctypes
import os
import select
import signal
from dataclasses import dataclass
from pathlib import Path

from .cgroups import limited_groups

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, kw_only=True)
class Activity:
    """What a process is doing; see proc(5).

    Attributes:
        states: scheduler states of its threads (``R``, ``S``, ``D``, ``T``, ...).
        cpu_ticks: clock ticks of CPU time used so far.
    """

    states: frozenset[str]
    cpu_ticks: int

    @property
    def busy(self) -> bool:
        """Whether a thread runs, waits for a core, or waits for a disk."""
        return not self.states.isdisjoint("RD")


def resident_memory(pid: int) -> int:
    """Resident bytes of a process, 0 once it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def pin_to_core_share(rank: int, ranks: int) -> None:
    """Pin this process with all its threads to its share of the cores, if there is a core for every rank's threads.

    Without this, the scheduler may move processes that wake each other onto one core, where they take turns.
    """
    cores, threads = sorted(os.sched_getaffinity(0), key=_core_position), os.environ.get("OMP_NUM_THREADS", "1")
    if ranks * (int(threads) if threads.isdecimal() else 1) <= len(cores):
        share = cores[rank * len(cores) // ranks : (rank + 1) * len(cores) // ranks]
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # some sandboxes forbid it
                os.sched_setaffinity(int(thread), share)


def _core_position(cpu: int) -> tuple[int, ...]:
    """Sort key (socket, core, CPU), which puts the hardware threads of one core next to each other."""
    topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    try:
        return (*(int((topology / name).read_text()) for name in ("physical_package_id", "core_id")), cpu)
    except (OSError, ValueError):
        return (0, cpu, cpu)


def machine_memory() -> tuple[int, int]:
    """Bytes of memory that this process can still use, and its total.

    The total is the machine's (``meminfo`` in proc(5)), or a control group's limit, such as a container's.
    """
    fields = dict(line.split(b":") for line in Path("/proc/meminfo").read_bytes().splitlines()[:5])
    available, total = (1024 * int(fields[name].split()[0]) for name in (b"MemAvailable", b"MemTotal"))
    for group in limited_groups():
        available, total = min(available, group.left), min(total, group.limit)
    return max(0, available), total


def private_memory(pid: int) -> int:
    """Resident bytes that a process shares with no other process, 0 once it is gone."""
    return _mapped_memory(pid, "Private_Clean:", "Private_Dirty:")


def proportional_memory(pid: int) -> int:
    """Resident bytes of a process, in which a page shared by n processes counts 1/n; 0 once it is gone."""
    return _mapped_memory(pid, "Pss:")


def _mapped_memory(pid: int, *fields: str) -> int:
    """Return the sum of fields of ``smaps_rollup`` in proc(5), in bytes."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(fields))


def reset_peak_memory(pid: int) -> None:
    """Reset a process's peak memory, so that ``peak_memory`` measures from now on (``clear_refs`` in proc(5))."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_memory(pid: int) -> int:
    """Peak resident bytes of a process (``VmHWM`` in proc(5))."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def trim_heap() -> None:
    """Return freed heap memory to the system if the C library retains it, as glibc does."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim:
        malloc_trim(0)


def return_large_blocks() -> None:
    """Make glibc give blocks of a MiB and more back to the system when they are freed, instead of keeping up to 32 MiB.

    Kept blocks of different sizes add up, because they do not fit each other's uses.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(_M_MMAP_THRESHOLD, 1 << 20)


_M_MMAP_THRESHOLD = -3
"""``M_MMAP_THRESHOLD`` in mallopt(3)."""


def activity(pid: int) -> Activity | None:
    """The activity of a process, None once it is gone."""
    try:
        fields = _stat_fields(Path(f"/proc/{pid}"))
    except OSError:
        return None
    states = {fields[0]}
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):  # the thread has just ended
            states.add(_stat_fields(thread)[0])
    return Activity(states=frozenset(states), cpu_ticks=int(fields[11]) + int(fields[12]))


def _stat_fields(entry: Path) -> list[str]:
    """The fields of ``stat`` after the process name, which may itself contain spaces and parentheses."""
    return (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()


def wait_for_exit(pid: int, seconds: float) -> bool:
    """Wait for any process, not only a child, to exit. Return whether it exited in time."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return True
    try:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        return bool(poller.poll(seconds * 1000))
    finally:
        os.close(pidfd)


def send_signal(pid: int, number: signal.Signals) -> None:
    """Signal one process if it exists, never a process group: a peer in another PID namespace shows as pid 0."""
    if pid > 0:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends (prctl(2), PR_SET_PDEATHSIG).

    Raises:
        OSError: the kernel refuses.
    """
    if _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def describe_exit(returncode: int) -> str:
    """Describe a ``Popen.returncode``: ``"was killed by SIGKILL"`` or ``"exited with status 1"``."""
    if returncode >= 0:
        return f"exited with status {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    return f"was killed by {name}"
