"""What the page offers for ``devices``."""

from itertools import pairwise

import pytest
from any_folder_name.nodes.panel import devices
from any_folder_name.parallel_backend import env
from any_folder_name.parallel_backend.client import devices as parsing
from any_folder_name.parallel_backend.client import gpus
from any_folder_name.parallel_backend.errors import BackendUnavailable, InvalidRequest

pytestmark = pytest.mark.newest


@pytest.fixture
def machine(monkeypatch):
    def has(count: int) -> None:
        monkeypatch.setattr(gpus, "count", lambda: count)
        monkeypatch.setattr(parsing, "gpu_count", lambda: count)
        monkeypatch.setattr(devices, "_names", lambda count: [f"GPU of {count}"] * count)
        monkeypatch.setattr(devices, "parse_devices", parsing.parse_devices)

    return has


def values(found) -> list[str]:
    return [each["value"] for each in found["choices"]]


def test_a_few_gpus_are_offered_in_every_choice(machine) -> None:
    machine(1)
    assert values(devices.found_devices()) == ["all"]
    machine(3)
    found = devices.found_devices()
    assert values(found) == ["all", "0", "1", "2", "0,1", "0,2", "1,2"]
    assert [each["count"] for each in found["choices"]] == [3, 1, 1, 1, 2, 2, 2]
    assert found["gpus"] == ["GPU of 3"] * 3


def test_of_many_gpus_those_are_offered_that_lie_side_by_side(machine) -> None:
    machine(8)
    offered = values(devices.found_devices())
    assert offered == ["all", *map(str, range(8)), "0,1", "2,3", "4,5", "6,7", "0,1,2,3", "4,5,6,7"]
    machine(7)
    assert values(devices.found_devices())[8:] == ["0,1", "2,3", "4,5", "0,1,2,3"]


@pytest.mark.parametrize("count", [*range(9), 16])
def test_everything_that_is_offered_works(machine, count: int) -> None:
    machine(count)
    choices = devices.found_devices()["choices"]
    assert [len(parsing.parse_devices(each["value"]).indices) for each in choices] == [
        each["count"] for each in choices
    ]
    sizes = [each["count"] for each in choices[1:]]
    assert all(one <= other for one, other in pairwise(sizes))


def test_all_is_what_the_settings_say(machine, monkeypatch) -> None:
    machine(4)
    monkeypatch.setenv(env.DEVICES.name, "0,2")
    assert devices.found_devices()["choices"][0] == {"value": "all", "count": 2}


def test_what_is_wrong_is_said_and_any_text_can_be_written(machine, monkeypatch) -> None:
    machine(2)

    def unavailable(text: str) -> None:
        raise BackendUnavailable("no backend answers on 10.0.0.1")

    monkeypatch.setattr(devices, "parse_devices", unavailable)
    assert devices.found_devices()["choices"][0] == {"value": "all", "count": 0}

    def hidden() -> int:
        raise InvalidRequest("CUDA_VISIBLE_DEVICES=GPU-a: torch sees none of them")

    monkeypatch.setattr(gpus, "count", hidden)
    found = devices.found_devices()
    assert (values(found), found["gpus"]) == (["all"], [])
    assert "torch sees none of them" in found["problem"]
