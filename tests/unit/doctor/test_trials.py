"""The checks that try two ranks judge what they measure."""

import pytest

from parallel_backend.client import gpus as known_gpus
from parallel_backend.doctor.checks import trial
from parallel_backend.doctor.finding import Setting
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.model_spec import Devices
from tests.unit.doctor.faked_machine import SETTING, have, verdicts


@pytest.mark.parametrize(("measured", "verdict"), [((1e-3, 1e9), "fine"), ((9e-3, 1e9), "slow"), ((1e-3, 1e8), "slow")])
def test_exchange(monkeypatch, measured, verdict):
    have(monkeypatch, 0)
    monkeypatch.setattr(trial, "_measure", lambda folder, devices: measured)
    assert verdicts(trial.exchange(SETTING)) == [verdict]


@pytest.mark.parametrize(("error", "verdict"), [(1e-6, "fine"), (2e-4, "broken"), (float("nan"), "broken")])
def test_forward(monkeypatch, error, verdict):
    have(monkeypatch, 0)
    monkeypatch.setattr(trial, "_difference", lambda folder, devices: error)
    assert verdicts(trial.forward(SETTING)) == [verdict]


def test_devices_of_the_trials(monkeypatch):
    seen = 3
    monkeypatch.setattr(known_gpus, "count", lambda: seen)
    monkeypatch.setattr("parallel_backend.client.devices.gpu_count", lambda: seen)
    monkeypatch.setenv("PARALLEL_DIT_COLLECTIVES", "")
    assert trial._devices(SETTING).indices == (0, 1)
    assert trial._devices(Setting(folder="", devices="2,1")).indices == (2, 1)
    seen = 1
    one = trial._devices(SETTING)
    assert (one.kind, one.indices, one.collectives) == ("cuda", (0, 0), "gloo")
    seen = 0
    assert trial._devices(SETTING) == Devices(kind="cpu", indices=(0, 1))


def test_a_forward_that_differs_is_found(monkeypatch, tmp_path):
    class Wrong:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def call(self, message, inputs):
            whole = inputs["0.hidden_states"]
            return {"0": whole + 0.01 * whole.abs().max() * (message.model.layout != ParallelLayout())}

    monkeypatch.setattr(trial, "temporary_backend", lambda folder: Wrong())
    assert trial._difference(tmp_path, Devices(kind="cpu", indices=(0, 1))) == pytest.approx(0.01, rel=1e-3)
