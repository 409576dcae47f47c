"""The devices that spare ranks are for before a request names some."""

from pathlib import Path

import pytest

from parallel_backend.protocol.model_spec import VISIBLE
from parallel_backend.supervisor.ranks.expected_devices import expected_devices


@pytest.mark.parametrize(
    ("nvidia", "amd", "variables", "expected"),
    [
        (0, 0, {}, ("cpu", 2)),
        (0, 0, {"PARALLEL_DIT_CPU_RANKS": "3"}, ("cpu", 3)),
        (0, 0, {"PARALLEL_DIT_CPU_RANKS": "many"}, ("cpu", 1)),
        (4, 0, {}, ("cuda", 4)),
        (4, 0, {"CUDA_VISIBLE_DEVICES": "2,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, ("cuda", 2)),
        (4, 0, {"CUDA_VISIBLE_DEVICES": ""}, ("cpu", 2)),
        (0, 3, {}, ("cuda", 3)),
        (0, 3, {"HIP_VISIBLE_DEVICES": "1"}, ("cuda", 1)),
    ],
)
def test_the_devices_that_a_first_request_will_probably_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nvidia: int, amd: int, variables: dict[str, str],
    expected: tuple[str, int],
) -> None:  # fmt: skip
    for name in VISIBLE:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for i in range(nvidia):
        (tmp_path / f"proc/driver/nvidia/gpus/0000:0{i}").mkdir(parents=True)
    for i in range(amd + 1):
        node = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{i}"
        node.mkdir(parents=True)
        (node / "gpu_id").write_text(f"{i}\n")
    devices = expected_devices(tmp_path)
    assert (devices.kind, len(devices.indices)) == expected
    if devices.kind == "cuda":
        assert dict(devices.visible) == variables
