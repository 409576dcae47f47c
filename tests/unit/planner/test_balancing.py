"""Layouts with shares by speed: when there are any, with which speeds, and that the planner takes them."""

from dataclasses import replace

import pytest

from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.loading.offload_plan import with_slack
from parallel_backend.planner.balancing import adapted, by_memory, by_speed
from parallel_backend.planner.compute import interpolated
from parallel_backend.planner.enumeration import layouts
from parallel_backend.planner.hardware import shipped
from parallel_backend.planner.hardware.description import Hardware, Link
from parallel_backend.planner.memory import work_bytes
from parallel_backend.planner.models import find
from parallel_backend.planner.planning import plan
from parallel_backend.planner.prediction import predict
from parallel_backend.planner.request import prompt
from parallel_backend.planner.slowdown import as_now

FAST = shipped.card("RTX 4090")


def of(*speeds, attention=None):
    devices = tuple(
        replace(FAST, matrix=FAST.matrix * each, attention=FAST.attention * other)
        for each, other in zip(speeds, attention or speeds, strict=True)
    )
    links = (Link(devices=tuple(range(len(speeds))), bandwidth=1e12, latency=1e-9),)
    return Hardware(name="cards", devices=devices, links=links)


@pytest.fixture(scope="module")
def asked():
    return prompt(find("wan2.1-t2v-1.3b"), "480x480x17", steps=8, guided=True)


@pytest.mark.parametrize(
    ("text", "speeds", "attention", "expected"),
    [
        ("ulysses=2", (1, 0.5), None, "ulysses=2 balance=1:0.5"),
        ("ulysses=2", (0.25, 0.5), (1, 1), "ulysses=2 balance=0.5:1/1:1"),
        ("ring=2", (1, 0.5), (1, 0.25), "ring=2 balance=1:0.5"),  # whose ranks have tokens alone
        ("tensor=2", (1, 0.5), (1, 0.25), "tensor=2 balance=1:0.5/1:0.25"),
        ("cfg=2 ulysses=2", (1, 0.5, 0.8, 0.6), None, "cfg=2 ulysses=2 balance=1:0.62"),  # 0.8 and 0.5 of the groups
        ("ulysses=2", (1, 0.9), None, None),
        ("ulysses=3", (1, 0.86, 0.84), None, "ulysses=3 balance=1:1:0.9"),
        ("ulysses=3", (1, 0.9, 0.5), None, "ulysses=3 balance=1:1:0.53"),  # the first two differ by chance
        ("ring=2", (1, 1), (1, 0.5), None),
        ("ulysses=2", (1, 1), (1, 0.5), "ulysses=2 balance=1:1/1:0.5"),
        ("dsp=2", (1, 0.5), (1, 0.25), "dsp=2 balance=1:0.5/1:0.25"),
        ("cfg=2", (1, 0.5), None, None),
        ("data=2", (1, 0.5), (1, 0.25), "data=2 balance=1:0.5"),
        ("cfg=2 data=2", (1, 0.5, 0.8, 0.6), None, "cfg=2 data=2 balance=0.83:1"),
        ("data=2", (1, 0.9), None, None),
        ("data=2", (1, 1e-9), None, None),
        ("pipe=2 patches=1", (1, 0.5), None, None),  # which measures for itself
        ("ulysses=2", (1, 1e-9), None, None),
    ],
)
def test_speeds_of_the_ranks_that_share_a_row(text, speeds, attention, expected):
    found = by_speed(ParallelLayout.parse(text), of(*speeds, attention=attention))
    assert found == (expected and ParallelLayout.parse(expected))


def test_measured_curves_count_where_there_are_some():
    first, second = (
        replace(FAST, layers=((0.5, taken / 2), (1.0, taken)), attends=((1e9, taken),)) for taken in (2.0, 4.0)
    )
    hardware = replace(of(1, 1), devices=(first, second))
    assert by_speed(ParallelLayout(ring=2), hardware) == ParallelLayout.parse("ring=2 balance=1:0.5")


@pytest.mark.parametrize("text", ["ring=3", "tensor=3", "ulysses=3"])
def test_all_take_equally_long_where_small_shares_cost_more_than_in_proportion(text):
    fixed, speeds = 0.15, (1, 1, 0.5)
    curves = [tuple((part, (fixed + part) / speed) for part in (0.1, 0.25, 0.5, 1.0)) for speed in speeds]
    devices = tuple(
        replace(FAST, layers=curve, attends=((1e9, 1 / speed),)) for curve, speed in zip(curves, speeds, strict=True)
    )
    found = by_speed(ParallelLayout.parse(text), replace(of(1, 1, 1), devices=devices))
    assert found is not None
    assert found.balance[2] < 0.4
    shares = [each / sum(found.balance) for each in found.balance]
    seconds = [interpolated(curve, share) for curve, share in zip(curves, shares, strict=True)]
    assert max(seconds) < 1.02 * min(seconds)


def test_speeds_that_were_measured_beside_each_other_count_most():
    devices = tuple(
        replace(FAST, layers=((0.5, seconds / 2), (1.0, seconds)), balanced=balanced)
        for seconds, balanced in ((1.0, 0.21), (1.3, 0.19), (2.0, 0.09))
    )
    measured = replace(of(1, 1, 1), devices=devices)
    assert by_speed(ParallelLayout(ring=3), measured) == ParallelLayout.parse("ring=3 balance=1:1:0.45")
    alike = replace(measured, devices=tuple(replace(each, balanced=0.2) for each in devices))
    assert by_speed(ParallelLayout(ring=3), alike) is None
    now = as_now(measured, (1.0, 0.5, 1.0))
    assert by_speed(ParallelLayout(ring=3), now) == ParallelLayout.parse("ring=3 balance=1:0.44:0.44")


def test_cores_of_a_cpu_vary_more():
    unlike = by_speed(ParallelLayout(ring=2), replace(of(1, 0.7), launch=0.0))
    assert unlike is None
    assert by_speed(ParallelLayout(ring=2), replace(of(1, 0.5), launch=0.0)) is not None


def test_a_rank_with_more_of_the_weights_needs_room_for_them(asked):
    even, hardware = ParallelLayout(tensor=2), of(1, 0.3)
    shared = by_speed(even, hardware)
    assert shared is not None
    small, large = (predict(asked, layout, hardware).room for layout in (even, shared))
    assert large.weights > 1.3 * small.weights
    cards = tuple(replace(each, memory=1.2 * small.taken) for each in hardware.devices)
    fits = [predict(asked, layout, replace(hardware, devices=cards)).room.fits for layout in (even, shared)]
    assert fits == [True, False]


def test_stages_are_cut_by_the_speeds_of_their_devices(asked):
    texts = ("pipe=2 patches=1", "pipe=2 patches=1 balance=1:0.5", "pipe=2 patches=1 balance=1:1")
    measured, given, even = (predict(asked, ParallelLayout.parse(text), of(1, 0.5)) for text in texts)
    assert measured.sampling == given.sampling < 0.85 * even.sampling
    assert measured.room.weights == given.room.weights > even.room.weights
    assert str(measured.layout) == texts[0]
    nearly = [predict(asked, ParallelLayout.parse(text), of(1, 0.9)).sampling for text in texts]
    assert nearly[0] == nearly[2]


@pytest.mark.parametrize(
    ("text", "speeds", "expected"),
    [
        ("pipe=2 ulysses=2 patches=1", (1, 0.5, 1, 1), "pipe=2 ulysses=2 patches=1 balance=0.5:1"),
        ("pipe=3 patches=1", (1, 0.9, 0.5), "pipe=3 patches=1 balance=1:1:0.5"),
        ("ring=2 stale=previous", (1, 0.5), "ring=2 stale=previous balance=1:0.5"),
        ("pipe=2 patches=1", (1, 1e-9), "pipe=2 patches=1 balance=1:0.001"),
        ("ulysses=2", (1, 0.5), "ulysses=2"),
    ],
)
def test_what_adapts_is_predicted_as_the_ranks_run_it(asked, text, speeds, expected):
    layout, hardware = ParallelLayout.parse(text), of(*speeds)
    assert adapted(layout, hardware) == ParallelLayout.parse(expected)
    assert predict(asked, layout, hardware).sampling > 0


def test_equal_devices_have_equal_shares(asked):
    assert not any(layout.balance for layout in layouts(asked, of(1, 1, 1)))


@pytest.mark.parametrize("text", ["ulysses=2", "ring=2", "tensor=2"])
def test_shares_by_speed_are_predicted_to_be_faster(asked, text):
    even, hardware = ParallelLayout.parse(text), of(1, 0.5)
    shared = by_speed(even, hardware)
    assert shared is not None
    one, other = (predict(asked, layout, hardware) for layout in (even, shared))
    assert 1.2 < one.sampling / other.sampling < 1.5
    assert one.decoding == other.decoding  # the VAE's rows are shared by speed whatever the layout is


def test_rows_of_the_vae_are_shared_by_speed(asked):
    alone, alike, unlike = (
        predict(asked, ParallelLayout(), hardware).decoding or 0.0  # devices that sample nothing decode, too
        for hardware in (of(1, 1).first(1), of(1, 1), of(1, 0.5))
    )
    assert alike == pytest.approx(alone / 2)
    assert unlike == pytest.approx(alone / 1.5)


def test_slower_devices_attend_to_fewer_frames():
    asked = prompt(find("open-sora-1.2"), "512x512x80", steps=2)
    hardware = of(1, 0.5)
    even, shared = ParallelLayout(dsp=2), ParallelLayout.parse("dsp=2 balance=1:0.5")
    one, other = (predict(asked, layout, hardware).step.attention for layout in (even, shared))
    assert 1.2 < one / other < 1.5


def with_memory(asked, layout, *parts):
    """A machine whose devices have room for these parts of the blocks' weights, and all else that a rank needs."""
    hardware, sizes = of(*[1] * len(parts)), asked.sizes
    beside = sizes.outside + with_slack(max(work_bytes(asked, layout)))
    memory = [beside + part * sum(sizes.blocks) for part in parts]
    devices = tuple(replace(each, memory=room) for each, room in zip(hardware.devices, memory, strict=True))
    return replace(hardware, devices=devices, host_memory=1e9)


@pytest.mark.parametrize(
    ("text", "parts", "expected"),
    [
        ("tensor=2", (1.2, 0.4), "tensor=2 balance=1:0.61"),  # 0.95 of 0.4, and the rest
        ("tensor=2", (0.3, 1.2), "tensor=2 balance=0.4:1"),
        ("tensor=2", (0.6, 0.6), None),
        ("tensor=2", (0.5, 0.5), None),  # too little for both together, but for a part that is left free
        ("tensor=2", (1.2, 0.0), None),
        ("tensor=3", (0.2, 0.4, 0.9), "tensor=3 balance=0.44:0.88:1"),
        ("tensor=2 balance=1:0.5", (0.6, 0.9), "tensor=2 balance=1:0.75"),
        ("cfg=2 tensor=2", (1.2, 0.6, 1.2, 0.4), "cfg=2 tensor=2 balance=1:0.61"),
        ("pipe=2 patches=1", (1.2, 0.4), "pipe=2 patches=1 balance=1:0.61"),
        ("pipe=2", (0.3, 1.2), "pipe=2 balance=0.4:1"),
        ("cfg=2 pipe=2", (1.2, 0.6, 1.2, 0.4), "cfg=2 pipe=2 balance=1:0.61"),
        ("pipe=2", (0.6, 0.6), None),
        ("tensor=2 ulysses=2", (1.2, 0.4, 1.2, 0.4), None),
        ("ulysses=2", (1.2, 0.4), None),
    ],
)
def test_a_device_with_little_memory_gets_a_smaller_part_of_the_weights(asked, text, parts, expected):
    layout = ParallelLayout.parse(text)
    hardware = with_memory(asked, layout, *parts)
    found = by_memory(layout, asked, hardware)
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert found.balance == pytest.approx(ParallelLayout.parse(expected).balance, abs=0.01)
        assert predict(asked, found, hardware).room.fits
        assert not predict(asked, layout, hardware).room.fits


def test_the_planner_gives_a_smaller_device_less_where_no_other_layout_fits():
    asked = prompt(find("wan2.1-t2v-1.3b"), "480x480x17", steps=8)
    hardware = with_memory(asked, ParallelLayout(tensor=2), 0.8, 0.4)
    even = predict(asked, ParallelLayout(tensor=2), hardware).room
    assert not even.fits
    made = plan(asked, hardware)
    large, small = made.chosen.layout.balance
    assert small < 0.7 * large
    assert made.chosen.room.fits
    assert "gives slower or smaller devices less" in made.reason


def test_the_planner_takes_them_and_says_so(asked):
    made = plan(asked, of(1, 0.4))
    assert made.chosen.layout.balance
    assert "gives slower or smaller devices less" in made.reason
    assert made.rule.layout == ParallelLayout(cfg=2)


@pytest.mark.parametrize(
    ("samples", "expected"), [(2, ["data=2"]), (3, ["data=2"]), (8, ["data=2", "data=2 balance=1:0.34"])]
)
def test_samples_are_shared_by_speed_where_that_makes_a_difference(asked, samples, expected):
    found = [
        str(each) for each in layouts(replace(asked, samples=samples, guided=False), of(1, 0.34)) if each.data == 2
    ]
    assert sorted(found) == expected
