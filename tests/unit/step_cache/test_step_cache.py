"""Which calls of a sampling are forecast, and what a forecast is."""

from collections.abc import Sequence

import pytest
import torch

from parallel_backend.errors import InvalidRequest
from parallel_backend.step_cache.forecast import forecast, weights
from parallel_backend.step_cache.history import StepHistory
from parallel_backend.step_cache.schedule import Moment, position_of, step_of
from parallel_backend.step_cache.settings import PRESETS, StepCache, preset


def moments(steps: int, models: Sequence[str] = ()) -> list[Moment]:
    return [Moment(position=float(step), steps=steps, model=models[step] if models else "") for step in range(steps)]


def computed(cache: StepCache, calls: Sequence[Moment]) -> list[int]:
    """The places of the calls that are computed."""
    history, places = StepHistory[str](cache), []
    for place, moment in enumerate(calls):
        if history.skips(moment):
            history.forecast(moment)
        else:
            history.add(moment, {"a": torch.zeros(1)})
            places.append(place)
    assert (history.forecasts, history.calls) == (len(calls) - len(places), len(calls))
    return places


@pytest.mark.parametrize("order", [0, 1, 2])
def test_a_polynomial_of_its_order_is_forecast_exactly(order: int) -> None:
    places, place = [9.0, 8.5, 7.25][: order + 1], 6.75

    def value(at: float) -> torch.Tensor:
        return torch.tensor([2.0, -1.0]) + torch.tensor([0.5, 0.25]) * at**order if order else torch.tensor([3.0, 4.0])

    found = forecast([value(each) for each in places], weights(places, place))
    assert torch.allclose(found, value(place), rtol=1e-5)


def test_a_forecast_has_the_dtype_of_what_was_computed() -> None:
    assert forecast([torch.ones(2, dtype=torch.bfloat16)] * 2, [2.0, -1.0]).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("cache", "steps", "places"),
    [
        (StepCache(interval=2), 8, [0, 2, 4, 6, 7]),
        (StepCache(interval=3), 10, [0, 3, 6, 9]),
        (StepCache(interval=2, warmup=3, final=2), 10, [0, 1, 2, 4, 6, 8, 9]),
        (StepCache(interval=4, first=5, final=0), 12, [0, 1, 2, 3, 4, 8]),
        (StepCache(interval=1), 4, [0, 1, 2, 3]),
        (StepCache(interval=2, final=9), 5, [0, 1, 2, 3, 4]),
    ],
)
def test_the_schedule(cache: StepCache, steps: int, places: list[int]) -> None:
    assert computed(cache, moments(steps)) == places


def test_another_transformer_warms_up_again() -> None:
    calls = moments(9, models=["high"] * 4 + ["low"] * 5)
    assert computed(StepCache(interval=3, warmup=2, final=0), calls) == [0, 1, 4, 5, 8]


def test_a_sampling_that_begins_anew_forgets_the_one_before() -> None:
    assert computed(StepCache(interval=3, final=0), moments(6)[:5] + moments(6)) == [0, 3, 5, 8]


def test_a_call_at_the_place_of_an_earlier_one_takes_its_place() -> None:
    history = StepHistory[str](StepCache(interval=2, final=0))
    first, second, third = moments(3)
    for moment, value in ((first, 1.0), (second, 5.0), (second, 3.0)):
        history.skips(moment)
        history.add(moment, {"a": torch.tensor([value])})
    assert history.skips(third)
    assert history.forecast(third)["a"].item() == pytest.approx(5.0)


def test_a_second_call_within_a_step_is_computed_as_the_first_is() -> None:
    calls = [Moment(position=position, steps=4) for position in (0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0)]
    assert computed(StepCache(interval=2), calls) == [0, 1, 4, 5, 6]


def test_the_order_grows_with_what_is_known() -> None:
    history = StepHistory[str](StepCache(interval=2, order=2, final=0))
    calls = moments(4)
    history.add(calls[0], {"a": torch.tensor([1.0])})
    assert history.forecast(calls[1])["a"].item() == pytest.approx(1.0)
    history.add(calls[2], {"a": torch.tensor([3.0])})
    assert history.forecast(calls[3])["a"].item() == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("sigma", "step"), [(1.0, 0), (2.0, 0), (0.8, 1), (0.8 + 1e-7, 1), (0.7, 1), (0.5, 2), (0.2, 2), (0.0, 2)]
)
def test_a_call_belongs_to_the_step_around_it(sigma: float, step: int) -> None:
    assert step_of(sigma, [1.0, 0.8, 0.5, 0.0]) == step


@pytest.mark.parametrize(
    ("sigma", "position"), [(1.0, 0.0), (2.0, 0.0), (0.9, 0.5), (0.8, 1.0), (0.65, 1.5), (0.5, 2.0), (0.0, 2.99)]
)
def test_a_call_has_a_place_within_its_step(sigma: float, position: float) -> None:
    assert position_of(sigma, [1.0, 0.8, 0.5, 0.0]) == pytest.approx(position)


def test_a_step_of_no_length_has_one_place() -> None:
    assert position_of(0.5, [1.0, 0.5, 0.5]) == 1.0


@pytest.mark.parametrize(
    ("name", "steps", "least"), [("safe", 24, 1.84), ("safe", 50, 2.9), ("fast", 24, 2.6), ("fast", 50, 3.8)]
)
def test_a_preset_saves_what_the_page_says(name: str, steps: int, least: float) -> None:
    cache = preset(name, steps)
    assert cache is not None
    assert steps / len(computed(cache, moments(steps))) >= least


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("steps", [1, 4, 8])
def test_a_preset_computes_all_steps_of_a_distilled_model(name: str, steps: int) -> None:
    assert preset(name, steps) is None


def test_numbers_out_of_range_and_unknown_presets_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="step cache order=3: 0 to 2 works"):
        StepCache(interval=2, order=3)
    with pytest.raises(InvalidRequest, match="step cache 'faster' does not exist: safe, fast do"):
        preset("faster", 20)
