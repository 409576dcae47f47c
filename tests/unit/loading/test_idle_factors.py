"""Factors of LoRAs that no request uses are freed when the device is full."""

from typing import Any

import pytest
import torch
from torch import nn

from parallel_backend.loading import low_rank
from parallel_backend.loading.low_rank import LowRank
from parallel_backend.loading.parts import DeviceMemory, Parts
from parallel_backend.protocol.model_spec import Adapter

FACTORS = {"0": (LowRank(up=torch.ones(4, 1), down=torch.ones(1, 4), scale=1.0),)}


class _Changes:
    """Stands for the changes of a loaded part: there is no memory until idle factors are forgotten."""

    def __init__(self, module):
        self.low_rank = low_rank.LowRankHooks(module, "", {})
        self.forgotten = False

    def use(self, adapters, overlay):
        if not self.forgotten:
            raise torch.OutOfMemoryError("full")
        self.low_rank.use(adapters)

    def forget_idle(self):
        self.forgotten = self.low_rank.forget_idle()
        return self.forgotten


@pytest.fixture
def read(monkeypatch):
    """The ids of the LoRAs whose factors were read."""
    ids = []

    def read_factors(adapter, *_):
        ids.append(adapter.id)
        return FACTORS

    monkeypatch.setattr(low_rank, "read_factors", read_factors)
    return ids


def parts_of_a_model() -> Any:
    models: list[Parts] = []
    models.append(Parts("model", DeviceMemory(torch.device("cpu"), lambda: models)))
    return models[0]


def test_a_full_device_costs_the_idle_ones_alone(read):
    module = nn.Sequential(nn.Linear(4, 4))
    parts = parts_of_a_model()
    changes = parts._changes["transformer"] = _Changes(module)
    used, idle = (Adapter(path="", id=name, strength=1.0) for name in ("used", "idle"))
    changes.low_rank.use((used, idle))
    changes.low_rank.use((used,))
    parts._parts["transformer"] = module
    parts.changed_by("transformer", lambda each: each.use((used,), None))
    assert read == ["used", "idle"]
    changes.low_rank.use((used, idle))
    assert read == ["used", "idle", "idle"]


def test_an_error_stays_one_where_nothing_is_idle():
    module = nn.Sequential(nn.Linear(4, 4))
    parts = parts_of_a_model()
    parts._changes["transformer"] = _Changes(module)
    parts._parts["transformer"] = module
    with pytest.raises(torch.OutOfMemoryError):
        parts.changed_by("transformer", lambda each: each.use((), None))
    assert parts.has("transformer")
