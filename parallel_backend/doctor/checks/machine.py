"""Shared memory, limits of processes, and memory."""

import resource
import shutil
from pathlib import Path

from ... import processes
from ...cgroups import limited_groups
from ...client import gpus
from ..finding import Finding, Setting

SHARED = Path("/dev/shm")
_INFINIBAND = Path("/sys/class/infiniband")
_SHM_ENOUGH, _SHM_LEAST = 1e9, 64e6
_FILES_ENOUGH, _FILES_LEAST = 1024, 256
_MEMLOCK_ENOUGH = 64 << 20
_MEMORY_ENOUGH, _MEMORY_LEAST = 4e9, 1e9


def shared_memory(_: Setting) -> list[Finding]:
    """Room in ``/dev/shm``, through which NCCL exchanges between GPUs without peer access."""
    advice = "Give it 1 GB: --shm-size=1g in docker, or a larger tmpfs in /etc/fstab."
    several = gpus.count() > 1
    if not SHARED.is_dir():
        return [Finding(verdict="broken" if several else "fine", text="missing", advice=several * advice)]
    space = shutil.disk_usage(SHARED)
    text = f"{space.free / 1e9:.2f} of {space.total / 1e9:.2f} GB free"
    if not several:
        return [Finding.fine(f"{text}, which ranks here do not need")]
    if space.free < _SHM_LEAST:
        return [Finding.broken(text, advice)]
    if space.free < _SHM_ENOUGH:
        return [Finding.slow(text, advice)]
    return [Finding.fine(text)]


def limits(_: Setting) -> list[Finding]:
    """Open files and locked memory."""
    return [_files(), _locked_memory()]


def _files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text, advice = f"{_amount(soft)} open files", "Run ulimit -n 4096 before you start ComfyUI."
    if 0 <= hard < 4096:
        advice = f"Raise the limit of {hard} in /etc/security/limits.conf or of the container (--ulimit nofile=4096)."
    if 0 <= soft < _FILES_LEAST:
        return Finding.broken(text, advice)
    if 0 <= soft < _FILES_ENOUGH:
        return Finding.slow(f"{text}, too few for many ranks or layouts", advice)
    return Finding.fine(text)


def _locked_memory() -> Finding:
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    text = f"{_amount(soft, 1 << 20, ' MiB')} of locked memory"
    if 0 <= soft < _MEMLOCK_ENOUGH and _INFINIBAND.is_dir():
        advice = "NCCL cannot use InfiniBand: ulimit -l unlimited (--ulimit memlock=-1 in docker)."
        return Finding.slow(text, advice)
    return Finding.fine(text)


def _amount(limit: int, unit: int = 1, name: str = "") -> str:
    return "no limit" if limit < 0 else f"{limit // unit}{name}"


def memory(_: Setting) -> list[Finding]:
    """The machine's memory, or what a container or job leaves of it."""
    free, total = processes.machine_memory()
    groups = limited_groups()
    where = "that this control group (a container or job) may use" if groups else "of this machine"
    text = f"{free / 1e9:.1f} GB free of the {total / 1e9:.1f} GB {where}"
    advice = "End other programs, or raise the limit of the container or job: weights pass through this memory."
    if free < _MEMORY_LEAST:
        return [Finding.broken(text, advice)]
    if free < _MEMORY_ENOUGH:
        return [Finding.slow(text, advice)]
    return [Finding.fine(text)]
