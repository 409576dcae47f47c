"""What the kernel tells about processes, and is told: memory, whether they still move, how they ended, their cores."""

import contextlib
import ctypes
import os
import select
import signal
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, kw_only=True)
class Pulse:
    """Scheduler states of a process's threads (``R``, ``S``, ``D``, ``T``, ...) and processor ticks used so far; see
    proc(5)."""

    states: frozenset[str]
    ticks: int

    @property
    def would_move(self) -> bool:
        """Whether a thread waits for a disk, or for a core that others have."""
        return not self.states.isdisjoint("RD")


def memory(pid: int) -> int:
    """Resident bytes of a process, 0 once it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def stay_on_own_cores(rank: int, ranks: int) -> None:
    """Have this process and its threads to come run on its share of the cores, if there is one for each rank's threads.

    Without this the system moves processes that wake one another onto one core, and both wait for it.
    """
    cores, threads = sorted(os.sched_getaffinity(0), key=_place), os.environ.get("OMP_NUM_THREADS", "1")
    if ranks * (int(threads) if threads.isdecimal() else 1) <= len(cores):
        with contextlib.suppress(OSError):  # some sandboxes do not let it
            os.sched_setaffinity(0, cores[rank * len(cores) // ranks : (rank + 1) * len(cores) // ranks])


def _place(cpu: int) -> tuple[int, ...]:
    """Socket, core and number, so that the two threads of a core are neighbours."""
    folder = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
    try:
        return (*(int((folder / name).read_text()) for name in ("physical_package_id", "core_id")), cpu)
    except (OSError, ValueError):
        return (0, cpu, cpu)


def private_memory(pid: int) -> int:
    """Resident bytes that a process shares with no other, 0 once it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty")))


def forget_peak(pid: int) -> None:
    """Have ``peak`` count from now on (``clear_refs`` in proc(5))."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak(pid: int) -> int:
    """Resident bytes that a process has held at most."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def trim() -> None:
    """Give memory that this process has freed back to the system, where the C library keeps it (glibc does)."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim:
        malloc_trim(0)


def pulse(pid: int) -> Pulse | None:
    """What the process is doing, None once it is gone."""
    try:
        fields = _fields(Path(f"/proc/{pid}"))
    except OSError:
        return None
    states = {fields[0]}
    for thread in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            states.add(_fields(thread)[0])
    return Pulse(states=frozenset(states), ticks=int(fields[11]) + int(fields[12]))


def _fields(entry: Path) -> list[str]:
    """Those of ``stat`` behind the name, which may hold anything."""
    return (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()


def wait_gone(pid: int, seconds: float) -> bool:
    """Wait for a process that need not be a child; whether it ended in time."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return True
    try:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        return bool(poller.poll(seconds * 1000))
    finally:
        os.close(descriptor)


def end(pid: int, number: signal.Signals) -> None:
    """Signal one process, if it is still there; never a group (pid 0 is what another namespace shows)."""
    if pid > 0:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends (prctl(2), PR_SET_PDEATHSIG).

    Raises:
        OSError: the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def describe_exit(returncode: int) -> str:
    """How a process ended, from ``Popen.returncode``: ``"was killed by SIGKILL"`` or ``"exited with status 1"``."""
    if returncode >= 0:
        return f"exited with status {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    return f"was killed by {name}"


def last_line(path: Path, *, limit: int = 4096) -> str:
    """The last line of a log that is not blank, or an empty text."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - limit))
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
