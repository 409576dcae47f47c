"""Descriptions of machines: what they refuse, and that those that are shipped are whole."""

from dataclasses import replace
from pathlib import Path

import pytest

from parallel_backend.errors import InvalidRequest
from parallel_backend.planner.hardware import description, shipped
from parallel_backend.planner.hardware.description import Device, Hardware, Link

DEVICE = Device(name="card", matrix=1e12, attention=1e12, memory=1e10, bandwidth=1e11)
PAIR = Hardware(
    name="pair", devices=(DEVICE, DEVICE), links=(Link(devices=(0, 1), bandwidth=1e10, latency=1e-5),)
)  # fmt: skip


@pytest.mark.parametrize("name", shipped.MACHINES)
def test_a_shipped_machine_survives_its_own_text(name):
    machine = shipped.machine(name)
    assert description.parse(description.text(machine), name) == machine


def test_an_unknown_machine_names_those_that_are_described():
    with pytest.raises(InvalidRequest, match="8xH100") as refusal:
        shipped.machine("9xH100")
    assert "9xH100" in str(refusal.value)


def test_cards_of_unequal_speed_keep_their_order():
    machine = shipped.machine("unequal")
    speeds = [device.matrix for device in machine.devices]
    assert speeds == [max(speeds), speeds[1], speeds[2], min(speeds)]


def test_the_smallest_link_that_joins_two_devices_carries():
    machine = shipped.machine("2x8xH100-100Gbit")
    assert machine.link(0, 7).bandwidth == pytest.approx(360e9)
    assert machine.link(7, 8).bandwidth == pytest.approx(10e9)
    assert machine.link(7, 8).total == pytest.approx(20e9)
    assert machine.host_sizes == (8, 8)


def test_the_first_devices_keep_the_links_between_them():
    machine = shipped.machine("2x8xH100-100Gbit").first(9)
    assert (len(machine.devices), machine.host_sizes) == (9, (8, 1))
    assert machine.link(0, 8).bandwidth == pytest.approx(10e9)
    assert shipped.machine("8xH100").first(1).links == ()
    groups = tuple(
        Link(devices=devices, bandwidth=1.0, latency=1.0, together=True, around=2.0) for devices in ((0, 1), (0, 1, 2))
    )
    three = Hardware(name="three", devices=(DEVICE,) * 3, links=groups)
    kept = [(link.devices, link.together, link.around) for link in three.first(2).links]
    assert kept == [((0, 1), True, 2.0), ((0, 1), False, 0.0)]


def _one_card(matrix: str) -> bytes:
    card = f'{{"name": "a", "matrix": {matrix}, "attention": 1, "memory": 1, "bandwidth": 1}}'
    return f'{{"name": "x", "devices": [{card}]}}'.encode()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"{", "describes no machine"),
        (b'{"name": "x", "devices": []}', "0 devices"),
        (_one_card("0"), "matrix of device 'a' is 0"),
        (_one_card("-1"), "matrix of device 'a' is -1"),
        (_one_card("1e400"), "machine.json describes no machine"),
        (_one_card('"fast"'), "machine.json describes no machine"),
        (b"[" * 100_000, "describes no machine"),
    ],
)
def test_a_wrong_description_is_refused(data, words):
    with pytest.raises(InvalidRequest, match=words):
        description.parse(data, "machine.json")


def test_devices_that_nothing_joins_are_refused():
    with pytest.raises(InvalidRequest, match="joins devices 0 and 1"):
        replace(PAIR, links=())


def test_a_link_of_a_device_that_is_not_there_is_refused():
    with pytest.raises(InvalidRequest, match="link of device 2"):
        replace(PAIR, links=(*PAIR.links, Link(devices=(0, 2), bandwidth=1.0, latency=1.0)))


def test_hosts_have_to_hold_all_devices():
    with pytest.raises(InvalidRequest, match=r"hosts of pair have \[1\]"):
        replace(PAIR, hosts=(1,))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path):
    with pytest.raises(InvalidRequest, match="cannot be read"):
        description.read(tmp_path / "none.json")


def test_a_file_of_any_length_is_refused(tmp_path: Path):
    path = tmp_path / "long.json"
    path.write_bytes(b" " * (description.MAX_FILE + 1))
    with pytest.raises(InvalidRequest, match="more than"):
        description.read(path)


def test_the_file_in_the_documentation_is_a_description():
    page = (Path(__file__).parents[3] / "docs" / "planning.md").read_text(encoding="utf-8")
    found = description.parse(page.split("```json\n")[1].split("```")[0].encode(), "planning.md")
    assert [device.name for device in found.devices] == ["A", "B"]


def test_the_documentation_lists_all_machines():
    page = (Path(__file__).parents[3] / "docs" / "planning.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in shipped.MACHINES)
