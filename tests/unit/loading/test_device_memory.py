"""What makes room first, and that no more is freed than has to be."""

import gc
import logging

import pytest
import torch

from parallel_backend import env
from parallel_backend.loading import parts
from parallel_backend.loading.held_weights import Held, HeldWeights
from parallel_backend.loading.parts import DeviceMemory, Parts


class _Model:
    """Stands for a checkpoint of which each component takes 10 bytes, idle factors and spare weights 5."""

    def __init__(self, name, *parts, factors=False, spare=False):
        self.name, self.parts, self.factors, self.spare = name, list(parts), factors, spare
        self.waiting = False

    @property
    def nbytes(self):
        return 10 * len(self.parts) + 5 * self.factors + 5 * self.spare

    def has(self, name):
        return name in self.parts

    def drop(self, name):
        self.parts.remove(name)

    def free_spare(self):
        had, self.spare = self.spare, False
        return had

    def forget_held(self):
        had, self.waiting = self.waiting, False
        return had

    def forget_idle(self):
        had, self.factors = self.factors, False
        return had


@pytest.fixture
def models():
    """A model that is in use, and two others."""
    mine = _Model("mine", "transformer", "text_encoder", "transformer_2", factors=True)
    return mine, _Model("first", "vae", "transformer", factors=True), _Model("second", "text_encoder", "transformer")


@pytest.fixture
def memory(models):
    mine, *others = models
    return DeviceMemory(torch.device("cpu"), lambda: [mine, *others, others[0]])


def left(models):
    return {model.name: model.parts for model in models if model.parts}


def test_what_is_cheap_to_get_back_leaves_first(memory, models, caplog):
    caplog.set_level(logging.WARNING)
    models[0].spare = models[2].spare = True
    while memory.free_next(models[0], keep=("transformer",)):
        pass
    assert [record.message for record in caplog.records] == [
        "the device is full: freeing weights that only other layouts need",
        "the device is full: freeing weights that only other layouts need",
        "the device is full: freeing LoRAs of mine and first that are not in use",
        "the device is full: unloading the text_encoder of second to make room for mine",
        "the device is full: unloading the text_encoder of mine to make room for mine",
        "the device is full: unloading the vae of first to make room for mine",
        "the device is full: unloading the transformer of first to make room for mine",
        "the device is full: unloading the transformer of second to make room for mine",
        "the device is full: unloading the transformer_2 of mine to make room for mine",
    ]
    assert left(models) == {"mine": ["transformer"]}


@pytest.mark.parametrize(
    ("needed", "first", "second"),
    [
        (0, ["vae", "transformer"], ["text_encoder", "transformer"]),
        (20, ["vae", "transformer"], ["text_encoder", "transformer"]),
        (30, ["vae", "transformer"], ["text_encoder", "transformer"]),
        (31, ["vae", "transformer"], ["transformer"]),
        (50, ["vae", "transformer"], ["transformer"]),
        (70, [], ["transformer"]),
        (1000, [], []),
    ],
)
def test_no_more_leaves_than_has_to(memory, models, monkeypatch, needed, first, second):
    monkeypatch.setenv(env.MEMORY_LIMIT.name, "100")
    memory.free_up(needed, models[0], keep=("transformer",))
    assert (models[1].parts, models[2].parts) == (first, second)


def test_cpu_ranks_without_a_limit_take_from_one_memory(memory, models, monkeypatch):
    room, sharers = memory.room, memory.sharers(3)
    assert room.lacks(room.free // 2, sharers)
    assert not room.lacks(room.free // 8, sharers)


def test_imports_are_frozen_once_and_before_anything_is_loaded(memory, monkeypatch):
    done = []
    parts._freeze_imports.cache_clear()
    monkeypatch.setattr(gc, "freeze", lambda: done.append("frozen"))
    model = Parts("model", memory)
    for name in ("transformer", "vae"):
        model.get(name, lambda: done.append("loaded"), nbytes=1)
    assert done == ["frozen", "loaded", "loaded"]


def test_weights_that_are_held_for_a_part_that_does_not_load_are_freed(memory):
    model = Parts("model", memory)
    held = HeldWeights({"weight": Held(tensor=torch.zeros(3), dim=0, ranges=None)})
    model.held["transformer"] = held
    assert model.nbytes == 12
    assert not model.free_spare()
    assert (model.forget_held(), model.nbytes, model.forget_held()) == (True, 0, False)


def test_weights_for_a_part_that_is_about_to_be_loaded_leave_last(memory, models):
    models[0].waiting = True
    while models[0].waiting:
        assert memory.free_next(models[0], keep=("transformer",))
    assert left(models) == {"mine": ["transformer"]}
    assert not memory.free_next(models[0], keep=("transformer",))
