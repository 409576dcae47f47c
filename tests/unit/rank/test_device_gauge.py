"""What a rank says of its device."""

import os

import torch

from parallel_backend.protocol.status import RankStatus
from parallel_backend.rank import gpu_load
from parallel_backend.rank.device_gauge import DeviceGauge

STATUS = RankStatus(rank=0, pid=1, device="cpu", memory=5)


def test_a_cpu_rank_has_the_memory_of_its_machine_and_its_share_of_the_cores() -> None:
    cores = len(os.sched_getaffinity(0))
    clock, cpu = iter([0.0, 2.0, 4.0]), iter([1.0, 1.0 + cores, 1.0 + 10 * cores])
    gauge = DeviceGauge(torch.device("cpu"), clock=lambda: next(clock), cpu_clock=lambda: next(cpu))
    half, over = gauge.added_to(STATUS), gauge.added_to(STATUS)
    assert (half.load, over.load) == (0.5, 1.0)
    assert (half.device_name, half.memory) == ("CPU", 5)
    with open("/proc/meminfo", encoding="ascii") as file:
        total = int(file.readline().split()[1]) << 10
    assert half.device_total == total
    assert 0 < half.device_used < total


def test_without_the_drivers_library_a_gpu_has_no_load(monkeypatch) -> None:
    monkeypatch.setattr(gpu_load, "_LIBRARY", "no-such-library.so")
    for function in (gpu_load._nvml, gpu_load._handle):
        function.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: type("", (), {"uuid": "u"}))
    assert gpu_load.load_of(torch.device("cuda:0")) is None
