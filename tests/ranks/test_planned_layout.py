"""A model that asks for a plan: the ranks measure themselves once, agree on a layout, and give the same prediction."""

import pytest

from parallel_backend.client.temporary_backend import temporary_backend
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.messages import Forward
from parallel_backend.protocol.model_spec import Devices, ModelSpec
from parallel_backend.verify import examples

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
        (record,) = caches.glob("*.json")
        written = record.stat().st_mtime_ns
        again, one = call(client, mode="fastest"), call(client, layout=ParallelLayout())
    assert record.stat().st_mtime_ns == written
    assert (planned - one).abs().max() <= 1e-4 * one.abs().max()
    assert (again - planned).abs().max() == 0
