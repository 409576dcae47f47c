"""A step whose branches ComfyUI puts into one call is not recorded first, and is one request in any case."""

import math
from typing import Any

import comfy.model_base
import comfy.samplers
import pytest
from any_folder_name.nodes.backend.connection import Handle
from helpers.inside_fixtures import Loaded, conditioning, empty_latent, ksampler, relative_error

CLOSE = 1e-4
STEPS = 4


@pytest.fixture
def branches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of branches of each request for a forward."""
    sent: list[int] = []
    call = Handle.call

    def counted(handle: Handle, message: Any, *args: Any, **options: Any) -> Any:
        sent.append(message.branches)
        return call(handle, message, *args, **options)

    monkeypatch.setattr(Handle, "call", counted)
    return sent


@pytest.fixture
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """An entry for each prompt that ComfyUI has prepared for a call."""
    entries: list[int] = []
    prepare = comfy.samplers.get_area_and_mult

    def counted(*args: Any) -> Any:
        entries.append(1)
        return prepare(*args)

    monkeypatch.setattr(comfy.samplers, "get_area_and_mult", counted)
    return entries


@pytest.mark.parametrize(("cfg", "of_step", "passes"), [(1.0, 1, STEPS), (4.0, 2, 2 * (STEPS + 1))])
def test_only_the_first_of_steps_with_guidance_is_recorded(
    native: Any,
    loaded: Loaded,
    branches: list[int],
    prepared: list[int],
    cfg: float,
    of_step: int,
    passes: int,
) -> None:
    reference = ksampler(native, empty_latent(), cfg=cfg, steps=STEPS)
    prepared.clear()
    assert relative_error(ksampler(loaded.model, empty_latent(), cfg=cfg, steps=STEPS), reference) < CLOSE
    assert branches == [of_step] * STEPS
    assert len(prepared) == passes


@pytest.mark.parametrize(
    ("enough", "requests"),
    [
        ((), [2, 2, 2, 2]),
        ((0, 1), [2, 1, 1, 2, 2]),  # the first step is recorded and replayed, and the second one is split
        ((0, 1, 2), [2, 2, 1, 1, 2]),
    ],
)
def test_steps_are_recorded_after_comfyui_has_split_one(
    native: Any, loaded: Loaded, branches: list[int], monkeypatch: pytest.MonkeyPatch, enough: Any, requests: list[int]
) -> None:
    reference, asked = ksampler(native, empty_latent(), steps=STEPS), list[int]()

    def in_some_steps(model: Any, shape: list[int], **options: Any) -> float:
        asked.extend([1] if shape[0] == 2 else [])
        return 0.0 if shape[0] < 2 or len(asked) - 1 in enough else math.inf

    monkeypatch.setattr(comfy.model_base.BaseModel, "memory_required", in_some_steps)
    assert relative_error(ksampler(loaded.model, empty_latent(), steps=STEPS), reference) < CLOSE
    assert branches == requests


def test_a_sampling_begins_anew(native: Any, loaded: Loaded, branches: list[int]) -> None:
    ksampler(loaded.model, empty_latent(), positive=conditioning(3), steps=1)
    assert loaded.model.target.one_call
    reference = ksampler(native, empty_latent(), cfg=1.0, steps=1)
    assert relative_error(ksampler(loaded.model, empty_latent(), cfg=1.0, steps=1), reference) < CLOSE
    assert loaded.model.target.one_call is None
    assert branches == [2, 1]
