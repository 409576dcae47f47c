"""How rank 0 answers the steps of a run with a cache, and how first blocks decide, without a model."""

import itertools
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from parallel_backend.denoiser.change_gate import ChangeGate
from parallel_backend.distributed.mesh import Axis
from parallel_backend.engine.cached_run import CachedRun
from parallel_backend.interfaces.geometry import IMAGE
from parallel_backend.interfaces.state import State
from parallel_backend.protocol.messages import FORECASTS, POSITION
from parallel_backend.step_cache.settings import StepCache

ALONE = Axis(name="all", group=None, ranks=(0,), index=0, gloo=True)
STEPS = 8


def denoiser(shards: Any = None) -> Any:
    return SimpleNamespace(
        mesh=SimpleNamespace(all_ranks=ALONE),
        plan=SimpleNamespace(branches=2, samples=(1, 1), teacache=()),
        experts=SimpleNamespace(name=lambda timestep: "high" if timestep.max() > 300 else "low"),
        shards=shards,
        shards_unless=shards,
    )


def answers(cache: StepCache, compute: Any, model: Any = None) -> list[dict[str, Tensor]]:
    run, model = CachedRun(cache), model or denoiser()
    times = [1000.0 * (1 - step / STEPS) for step in range(STEPS)]
    return [
        run.answer(
            {POSITION: torch.tensor([float(step), STEPS]), "0.timestep": torch.tensor([time, time])},
            model,
            partial(compute, time=time),
        )
        for step, time in enumerate(times)
    ]


def test_a_line_continues_and_another_transformer_begins_anew() -> None:
    found = answers(
        StepCache(interval=2, warmup=2, final=0),
        lambda shards, time: {"0": torch.tensor([time]), "1": torch.tensor([-time]), "seconds": torch.tensor(1.0)},
    )
    # 1000, 875 | 750 | 625 | 500 | 375 are of one transformer, 250 and 125 of the other
    assert [each[FORECASTS].tolist() for each in found] == [[int(step in (2, 4)), 1] for step in range(STEPS)]
    for step, each in enumerate(found):
        assert each["0"].item() == pytest.approx(1000 * (1 - step / STEPS), rel=1e-5)
        assert each["1"].item() == pytest.approx(-1000 * (1 - step / STEPS), rel=1e-5)
        assert ("seconds" in each) == (step not in (2, 4))


def test_a_call_that_the_first_block_skips_is_forecast() -> None:
    asked: list[bool] = []

    def shards(branches: Any, gate: ChangeGate, *, may: bool) -> dict[int, Tensor] | None:
        assert isinstance(gate, ChangeGate)
        asked.append(may)
        return None if may and len(asked) != 3 else {}

    def compute(shards: Any, time: float) -> dict[str, Tensor] | None:
        return None if shards({}) is None else {"0": torch.tensor([time]), "1": torch.tensor([time])}

    cache = StepCache(interval=3, method="residual", threshold=0.1)
    found = answers(cache, compute, denoiser(shards))
    assert asked == [False, True, True, True, True, False, False, False]
    assert [each[FORECASTS].tolist()[0] for each in found] == [0, 1, 0, 1, 1, 0, 0, 0]


class Attention(torch.nn.Module):
    """Returns its input, which is what the method ``change`` looks at."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states


def decisions(
    method: Any, threshold: float, values: list[float], may: list[bool], teacache: tuple[float, ...] = ()
) -> list[bool]:
    """What a gate says of first blocks that get ones and add, or attend to, these values."""
    plan: Any = SimpleNamespace(branches=1, samples=(2,), teacache=teacache)
    gate = ChangeGate(StepCache(interval=9, method=method, threshold=threshold), ALONE, plan)
    attention, found = Attention(), []
    family: Any = SimpleNamespace(attentions=[SimpleNamespace(module=attention)])
    for value, each in zip(values, may, strict=True):
        state = State(streams={IMAGE: torch.ones(2, 3, 4)})
        with gate.measuring(family, state, [(0, 0), (0, 1)]):
            attention(torch.full((2, 3, 4), value))
            gate.measured(state.with_streams(**{IMAGE: torch.ones(2, 3, 4) + value}))
        found.append(gate.skips(may=each))
    return found


def test_a_residual_is_compared_with_that_of_the_last_computed_call() -> None:
    values, may = [10.0, 10.5, 11.0, 11.2, 11.5], [False, True, True, True, True]
    assert decisions("residual", 0.08, values, may) == [False, True, False, True, True]


def test_changes_of_the_input_add_up_until_a_call_is_computed() -> None:
    values, may = [10.0, 10.5, 11.0, 11.2, 11.5], [False, True, True, True, True]
    assert decisions("change", 0.08, values, may) == [False, True, False, True, True]
    assert decisions("change", 0.12, values, may) == [False, True, True, True, False]


def test_a_published_polynomial_is_that_of_numpy() -> None:
    values, may = [10.0, 10.5, 11.0, 11.2, 11.5], [False, True, True, True, True]
    polynomial = (300.0, -20.0, 1.5, 0.01)
    added = np.poly1d(polynomial)([abs(b - a) / a for a, b in itertools.pairwise(values)])
    between = float(added[:2].sum() + added[:3].sum()) / 2  # so the third change is one too many
    assert decisions("change", between, values, may, polynomial) == [False, True, True, False, True]
    assert decisions("change", between, values, may) == [False, True, True, True, True]
    negative = (-1.0, 0.0)
    assert decisions("change", 9.0, values, may, negative) == [False] * 5
    for threshold in added[0] * 0.999, added[0] * 1.001:
        assert decisions("change", float(threshold), values[:2], may[:2], polynomial)[1] == (threshold > added[0])
        assert not decisions("residual", 0.01, values[:2], may[:2], polynomial)[1]
