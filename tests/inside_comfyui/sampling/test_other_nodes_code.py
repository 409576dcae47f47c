"""Code of other nodes that runs in every step runs as often as in ComfyUI alone, and sees real predictions."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import comfy.hooks
import pytest
import torch
from comfy.patcher_extension import CallbacksMP, WrappersMP
from helpers.inside_fixtures import Loaded, conditioning, empty_latent, ksampler, relative_error

CLOSE = 1e-4
WRAPPERS = (WrappersMP.DIFFUSION_MODEL, WrappersMP.APPLY_MODEL, WrappersMP.CALC_COND_BATCH)
CALLBACKS = (CallbacksMP.ON_PREPARE_STATE, CallbacksMP.ON_APPLY_HOOKS)


class Counting:
    """Counts calls by name, and keeps what transformers answered."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.answers: list[torch.Tensor] = []

    def wrapper(self, name: str) -> Callable[..., Any]:
        """Return a wrapper that counts."""

        def run(executor: Any, *args: Any, **options: Any) -> Any:
            self.counts[name] += 1
            answer = executor(*args, **options)
            self.answers += [answer] if name.endswith(WrappersMP.DIFFUSION_MODEL) else []
            return answer

        return run

    def callback(self, name: str) -> Callable[..., Any]:
        """Return a callback that counts."""
        return lambda *args: self.counts.update([name])

    def add_to(self, model: Any) -> Any:
        """Return the model with all kinds of code."""
        model = model.clone()
        for kind in WRAPPERS:
            model.add_wrapper_with_key(kind, "other", self.wrapper(kind))
        for kind in CALLBACKS:
            model.add_callback_with_key(kind, "other", self.callback(kind))
        model.set_model_unet_function_wrapper(lambda apply, given: self._function(apply, given))
        return model

    def _function(self, apply: Any, given: Any) -> Any:
        self.counts["function"] += 1
        return apply(given["input"], given["timestep"], **given["c"])

    def hooked(self, prompt: list[Any]) -> list[Any]:
        """Return a prompt whose hooks bring wrappers along."""
        kinds = (WrappersMP.DIFFUSION_MODEL, WrappersMP.APPLY_MODEL)
        wrappers = {kind: {"other's hook": [self.wrapper(f"hook's {kind}")]} for kind in kinds}
        return hooked(prompt, wrappers)


def hooked(prompt: list[Any], wrappers: dict[str, Any]) -> list[Any]:
    hook = comfy.hooks.TransformerOptionsHook({"wrappers": wrappers}, comfy.hooks.EnumHookScope.HookedOnly)
    group = comfy.hooks.HookGroup()
    group.add(hook)
    return [[text, {**extra, "hooks": group}] for text, extra in prompt]


@pytest.mark.parametrize("prompts", ["plain", "one", "both"])
def test_it_runs_as_often_as_in_comfyui_alone(native: Any, loaded: Loaded, prompts: str) -> None:
    counted = []
    for model in (native, loaded.model):
        counting = Counting()
        positive, negative = conditioning(1), conditioning(2)
        positive = positive if prompts == "plain" else counting.hooked(positive)
        negative = counting.hooked(negative) if prompts == "both" else negative
        ksampler(counting.add_to(model), empty_latent(), positive=positive, negative=negative)
        assert all(answer.abs().max() > 0 for answer in counting.answers)
        counted.append(counting.counts)
    assert counted[0] == counted[1]
    assert counted[0].keys() >= {*WRAPPERS, CallbacksMP.ON_PREPARE_STATE, "function"}
    assert (CallbacksMP.ON_APPLY_HOOKS in counted[0]) == (prompts != "plain")


def every_other_step(model: Any) -> tuple[Any, list[Any]]:
    """Answer every second call with the answer before, as a cache does."""
    answers: list[Any] = []

    def cached(executor: Any, *args: Any, **options: Any) -> Any:
        answers.append(answers[-1] if len(answers) % 2 else executor(*args, **options))
        return answers[-1]

    return model, hooked(conditioning(1), {WrappersMP.DIFFUSION_MODEL: {"other": [cached]}})


def louder_each_step(model: Any) -> tuple[Any, list[Any]]:
    """Scale predictions by the number of steps that a callback has seen."""
    model, steps = model.clone(), []
    model.add_callback_with_key(CallbacksMP.ON_PREPARE_STATE, "other", lambda *args: steps.append(1))
    model.add_wrapper_with_key(
        WrappersMP.DIFFUSION_MODEL, "other", lambda executor, *args, **options: executor(*args, **options) * len(steps)
    )
    return model, conditioning(1)


def halved_by_a_forward_hook(model: Any) -> tuple[Any, list[Any]]:
    """Halve what the transformer answers to every second call."""
    calls: list[int] = []

    def halved(module: Any, args: Any, answer: Any) -> Any:
        calls.append(1)
        return answer * 0.5 if len(calls) % 2 else answer

    model.model.diffusion_model.register_forward_hook(halved)
    return model, conditioning(1)


def halved_in_apply_model(model: Any) -> tuple[Any, list[Any]]:
    """Set a function on the model that halves every second prediction."""
    calls, inner = [], model.model.apply_model

    def halved(*args: Any, **options: Any) -> Any:
        calls.append(1)
        return inner(*args, **options) * (0.5 if len(calls) % 2 else 1.0)

    model.model.apply_model = halved
    return model, conditioning(1)


@pytest.mark.parametrize(
    "change", [every_other_step, louder_each_step, halved_by_a_forward_hook, halved_in_apply_model]
)
def test_code_that_remembers_gives_the_same_image(
    native: Any, load: Callable[..., Loaded], change: Callable[..., Any]
) -> None:
    reference = ksampler(native, empty_latent(), steps=4)
    results = []
    for model in (native, load().model):
        changed, positive = change(model)
        try:
            results.append(ksampler(changed, empty_latent(), positive=positive, steps=4))
        finally:
            model.model.diffusion_model._forward_hooks.clear()
            vars(model.model).pop("apply_model", None)
    assert relative_error(results[1], results[0]) < CLOSE
    assert relative_error(results[0], reference) > 10 * CLOSE
