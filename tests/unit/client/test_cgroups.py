"""What control groups leave of a machine's memory, on files as the kernel writes them and in a real group."""

import subprocess
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path

import pytest

from parallel_backend import processes
from parallel_backend.cgroups import limited_groups

MB = 1 << 20
V1, V2 = Path("sys/fs/cgroup/memory"), Path("sys/fs/cgroup")
_STAT = "anon {anon}\ninactive_file {file}\nactive_file 5\nslab_reclaimable 7\n"
_TOTALS = "inactive_file 3\nactive_file 4\ntotal_inactive_file {file}\ntotal_active_file 5\n"


def write_v2(group: Path, limit: str, used: int, file: int) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(_STAT.format(anon=used - file, file=file))


def write_v1(group: Path, limit: int, used: int, file: int) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (group / "memory.usage_in_bytes").write_text(f"{used}\n")
    (group / "memory.stat").write_text(_TOTALS.format(file=file))


@pytest.fixture
def system(tmp_path):
    (tmp_path / "proc/self").mkdir(parents=True)
    return tmp_path


def limits(system: Path) -> list[tuple[int, int]]:
    """Return what the groups leave, and their limits."""
    return [(group.left, group.limit) for group in limited_groups(system)]


def join(system: Path, *lines: str) -> None:
    (system / "proc/self/cgroup").write_text("".join(f"{line}\n" for line in lines))


def test_each_group_above_counts_and_files_in_the_cache_are_free(system):
    join(system, "0::/slurm/job/step")
    write_v2(system / V2 / "slurm/job/step", "max", 900, 10)
    write_v2(system / V2 / "slurm/job", "2000", 900, 300)
    write_v2(system / V2 / "slurm", "5000", 4000, 0)
    assert limits(system) == [(1405, 2000), (1005, 5000)]


def test_the_first_version_counts_the_groups_below(system):
    join(system, "12:cpu,cpuacct:/docker/f00", "4:memory:/docker/f00", "0::/system.slice")
    write_v1(system / V1 / "docker/f00", 2000, 900, 300)
    write_v1(system / V1, 1 << 62, 10_000, 0)
    assert limits(system) == [(1405, 2000)]


def test_a_container_sees_its_own_group_at_the_root(system):
    join(system, "4:memory:/docker/f00")
    write_v1(system / V1, 2000, 900, 300)
    assert limits(system) == [(1405, 2000)]


@pytest.mark.parametrize("lines", [[], ["0::/"], ["0::/gone", "3:cpu:/"]])
def test_no_limits_without_groups_or_files(system, lines):
    join(system, *lines)
    assert not limits(system)


def test_no_limits_where_the_system_tells_nothing(tmp_path):
    assert not limits(tmp_path)


@dataclass(frozen=True)
class FixedGroup:
    """Stands for a control group."""

    left: int
    limit: int


def test_memory_of_the_machine_is_the_least_that_any_limit_leaves(monkeypatch):
    total = processes.machine_memory()[1]
    for group, expected in [(FixedGroup(5 * MB, 8 * MB), (5 * MB, 8 * MB)), (FixedGroup(-3, 8 * MB), (0, 8 * MB))]:
        monkeypatch.setattr(processes, "limited_groups", lambda group=group: (group,))
        assert processes.machine_memory() == expected
    monkeypatch.setattr(processes, "limited_groups", lambda: (FixedGroup(1 << 58, 1 << 59),))
    assert processes.machine_memory()[1] == total
    assert processes.machine_memory()[0] < total


_REPORT = "from parallel_backend.processes import machine_memory; print(*machine_memory())"


@pytest.fixture
def limited_group():
    """A control group with 512 MB of memory, below the one of the tests."""
    above, limit = _memory_group()
    group = above / f"parallel-dit-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"this user may not make control groups: {error}")
    try:
        (group / limit).write_text(str(512 * MB))
        yield group
    except OSError as error:
        pytest.skip(f"this user may not limit control groups: {error}")
    finally:
        group.rmdir()


def test_a_process_in_a_real_group_sees_its_limit(limited_group):
    enter = f"import os; open({str(limited_group / 'cgroup.procs')!r}, 'w').write(str(os.getpid())); "
    output = subprocess.run(
        [sys.executable, "-c", enter + _REPORT], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    available, total = map(int, output.split())
    assert total == 512 * MB
    assert 0.8 * total < available <= total


def _memory_group() -> tuple[Path, str]:
    """Return the control group of this process that limits memory, and the name of its file for the limit."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return Path("/") / V1 / path.strip("/"), "memory.limit_in_bytes"
    return Path("/") / V2, "memory.max"
