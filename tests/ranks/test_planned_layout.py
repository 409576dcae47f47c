"""A model that asks for a plan: the ranks measure themselves once, agree on a layout, and give the same prediction."""

import json
from dataclasses import replace

import pytest
import torch

from lab.engine import lab_ranks
from parallel_backend import env
from parallel_backend.client.temporary_backend import temporary_backend
from parallel_backend.engine.layout_trial import CALLS
from parallel_backend.families.registry import family_of
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.planner import probe, record
from parallel_backend.planner.hardware.description import Link
from parallel_backend.planner.models import Model
from parallel_backend.planner.request import Prompt
from parallel_backend.protocol.messages import Forward, Trial
from parallel_backend.protocol.model_spec import Devices, ModelSpec
from parallel_backend.verify import examples
from tests.ranks import driver

WAN = "WanTransformer3DModel"
DEVICES = Devices(kind="cpu", indices=(0, 1))


@pytest.fixture
def caches(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path / "caches" / "parallel-dit" / "probes"


def test_two_ranks_measure_once_and_agree(tmp_path, caches):
    path = examples.write_checkpoint(tmp_path / "model", examples.module(WAN, "t2v"))
    inputs = examples.branches([examples.inputs(WAN, "t2v", batch=1)])
    notes = []

    def call(client, **options):
        spec = ModelSpec(path=str(path), devices=DEVICES, dtype="float32", **options)
        told = lambda progress, _: notes.append((progress.phase, progress.note))  # noqa: E731
        return client.call(Forward(model=spec, branches=1), inputs, on_progress=told)["0"]

    with temporary_backend(tmp_path) as client:
        planned = call(client, mode="fastest")
        assert any(phase == "planning" and "takes about" in note for phase, note in notes)
        (kept,) = caches.glob("*.json")
        written = kept.stat().st_mtime_ns
        again, one = call(client, mode="fastest"), call(client, layout=ParallelLayout())
    assert kept.stat().st_mtime_ns == written
    assert (planned - one).abs().max() <= 1e-4 * one.abs().max()
    assert (again - planned).abs().max() == 0


def exchanges(rank):
    """Measure the links of three ranks with few bytes."""
    variant = family_of(WAN).variants()["t2v"]
    request = probe.ProbeRequest(
        class_name=WAN, config={}, shapes={"hidden_states": variant.size}, dtype="float32", name="here",
        device_names=("cpu",) * 3,
    )  # fmt: skip
    world = driver.engine(rank)._agreements.world
    return probe._links(request, world, torch.device("cpu"), torch.float32)


def test_three_ranks_measure_what_goes_around_apart(pools):
    found = pools(3).run(exchanges)
    assert found[0] == found[1] == found[2]
    assert [(link.devices, link.bandwidth > 0, link.around > 0) for link in found[0]] == [
        ((0, 1), True, False), ((0, 1, 2), True, True),
    ]  # fmt: skip


@pytest.mark.long
def test_ranks_of_unlike_speed_are_measured_with_unlike_shares(tmp_path, monkeypatch):
    variant = family_of(WAN).variants()["t2v"]
    model = Model(name="small", class_name=WAN, config=variant.config, text=variant.text)
    shapes = Prompt(model=model, size=variant.size, steps=2, dtype=torch.float32).shapes
    request = probe.ProbeRequest(
        class_name=WAN, config=dict(variant.config), shapes={**shapes, "hidden_states": (1, 16, 3, 10, 12)},
        dtype="float32", name="here", device_names=("cpu", "cpu"),
    )  # fmt: skip
    message = Trial(model=ModelSpec(path="/", devices=DEVICES), name=probe.NAME)
    monkeypatch.setenv(env.HANDICAP.name, "1=4")
    with lab_ranks(), temporary_backend(tmp_path) as client:
        measured = probe.answered(client.call(message, probe.asked_by(request)))
    first, second = (device.balanced for device in measured.devices)
    assert 0 < second < 0.8 * first


def with_fast_links(path, second=1.0, faster=None):
    """Let a kept measurement say that a rank needs half of the time for half of the work, and exchanges none.

    Args:
        second: the second rank's speed.
        faster: by how much the first rank has become faster since then; None to let nobody look at that.
    """
    facts = record.facts_of(DEVICES)
    measured = record.read(path, facts).hardware
    assert measured is not None
    devices = tuple(
        replace(
            each,
            memory=1.0,  # what is free is asked anew
            alone=1.0,
            balanced=0.0,
            layers=((0.5, 0.5 / speed), (1.0, 1.0 / speed)),
            attends=(),
            attention=1e12 * speed,
        )
        for each, speed in zip(measured.devices, (1.0, second), strict=True)
    )
    links = (Link(devices=(0, 1), bandwidth=1e15, latency=1e-9),)
    paces = (measured.paces[0] / faster, measured.paces[1]) if faster else ()
    assert not record.write(path, facts, replace(measured, devices=devices, links=links, launch=0.0, paces=paces))


@pytest.mark.long
def test_the_fastest_stays_of_those_that_are_tried_in_the_first_steps(tmp_path, caches):
    """Each step is exact in whatever layout it runs."""
    path = examples.write_checkpoint(tmp_path / "model", examples.module(WAN, "t2v"))
    both = [examples.inputs(WAN, "t2v", batch=1, seed=seed) for seed in (1, 2)]
    notes: list[str] = []

    def call(client, time, **options):
        inputs = examples.branches([{**each, "timestep": each["timestep"] * 0 + time} for each in both])
        spec = ModelSpec(path=str(path), devices=DEVICES, dtype="float32", **options)
        told = lambda progress, _: notes.append(progress.note)  # noqa: E731
        return client.call(Forward(model=spec, branches=2), inputs, on_progress=told)

    with temporary_backend(tmp_path) as client:
        call(client, 900.0, mode="fit memory")
    (path_of_record,) = caches.glob("*.json")
    with_fast_links(path_of_record)
    times = [float(900 - 50 * step) for step in range(3 * CALLS + 2)]
    for again in (False, True):
        notes.clear()
        with temporary_backend(tmp_path) as client:
            wanted = [call(client, each, layout=ParallelLayout()) for each in times]
            found = []
            for place, each in enumerate(times):
                if place % 4 == 3:  # the run gives way, so the next step is a request of its own
                    call(client, each, layout=ParallelLayout())
                found.append(call(client, each, mode="fastest"))
        for one, other in zip(wanted, found, strict=True):
            assert all((one[i] - other[i]).abs().max() <= 1e-4 * one[i].abs().max() for i in ("0", "1"))
        said = [note for note in notes if "tried in the first steps" in note]
        assert len(said) == 1
        assert ("takes about" in "".join(notes)) != again  # what is kept on disk is not tried again
    (tried,) = json.loads(path_of_record.read_text())["tried"].values()
    assert len(tried) > 1


@pytest.mark.parametrize(
    ("change", "said"),
    [({"second": 0.5}, "balance=1:0.5"), ({"faster": 4.0}, "now rank 0 at ")],
)
def test_a_slower_rank_gets_less(tmp_path, caches, change, said):
    """It is measured as slower, or has become slower than it was when it was measured."""
    path = examples.write_checkpoint(tmp_path / "model", examples.module(WAN, "t2v"))
    inputs = examples.branches([examples.inputs(WAN, "t2v", batch=1)])
    notes: list[str] = []

    def call(client, **options):
        spec = ModelSpec(path=str(path), devices=DEVICES, dtype="float32", **options)
        told = lambda progress, _: notes.append(progress.note)  # noqa: E731
        return client.call(Forward(model=spec, branches=1), inputs, on_progress=told)["0"]

    with temporary_backend(tmp_path) as client:
        call(client, mode="fit memory")
        (path_of_record,) = caches.glob("*.json")
        with_fast_links(path_of_record, **change)
        planned, one = call(client, mode="fastest"), call(client, layout=ParallelLayout())
    assert any(
        said in note and "balance=1:0." in note and "gives slower or smaller devices less" in note for note in notes
    )
    assert (planned - one).abs().max() <= 1e-5 * one.abs().max()
