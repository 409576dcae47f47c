"""Seconds that are predicted from measured curves."""

from dataclasses import replace

import pytest
import torch

from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.planner.hardware import shipped
from parallel_backend.planner.hardware.description import Hardware, Link
from parallel_backend.planner.models import find
from parallel_backend.planner.prediction import predict
from parallel_backend.planner.request import Prompt

CARD = replace(shipped.card("RTX 4090"), layers=((0.5, 0.6), (1.0, 1.0)), attends=((1e9, 1e-9),))
TWO = Hardware(name="two", devices=(CARD, CARD), links=(Link(devices=(0, 1), bandwidth=1e15, latency=1e-9),))


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", 2.0), ("ulysses=2", 1.0), ("data=2", 1.0), ("pipe=2 patches=1", 1.5)],
)
def test_samples_with_part_of_the_tokens_take_as_long_as_one_with_all(text, expected):
    asked = Prompt(model=find("wan2.1-t2v-1.3b"), size=(3, 30, 30), steps=2, dtype=torch.float32, samples=2)
    layers = predict(asked, ParallelLayout.parse(text), TWO).step.layers
    assert layers == pytest.approx(expected, rel=0.01)
