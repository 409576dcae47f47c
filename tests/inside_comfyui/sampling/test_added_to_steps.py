"""What other nodes add to every step runs with Parallel Sampler, too: ComfyUI's loop runs the steps then."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from any_folder_name.parallel_backend.errors import InvalidRequest
from comfy.patcher_extension import CallbacksMP
from helpers.inside_fixtures import Loaded, empty_latent, ksampler, relative_error, run_parallel_sampler

CLOSE = 1e-4


def quieter(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that answers half of what another one does."""
    return lambda *args, **options: function(*args, **options) * 0.5


def replace(owner: Any, name: str, function: Any, undo: pytest.MonkeyPatch) -> None:
    undo.setitem(vars(owner), name, function)


def forward_hook(model: Any, undo: pytest.MonkeyPatch) -> None:
    hooks = model.model.diffusion_model._forward_hooks
    undo.setitem(hooks, 1, lambda module, args, answer: answer * 0.5)


def forward_pre_hook(model: Any, undo: pytest.MonkeyPatch) -> None:
    hooks = model.model.diffusion_model._forward_pre_hooks
    undo.setitem(hooks, 1, lambda module, args: (args[0] * 0.5, *args[1:]))


def forward(model: Any, undo: pytest.MonkeyPatch) -> None:
    transformer = model.model.diffusion_model
    replace(transformer, "forward", quieter(transformer.forward), undo)


def apply_model(model: Any, undo: pytest.MonkeyPatch) -> None:
    replace(model.model, "apply_model", quieter(model.model.apply_model), undo)


def inner_apply_model(model: Any, undo: pytest.MonkeyPatch) -> None:
    replace(model.model, "_apply_model", quieter(model.model._apply_model), undo)


def process_timestep(model: Any, undo: pytest.MonkeyPatch) -> None:
    replace(model.model, "process_timestep", lambda timestep, **options: timestep.sqrt() * 20, undo)


def prepare_state(model: Any, undo: pytest.MonkeyPatch) -> None:
    sampling = model.model.model_sampling
    undo.setattr(sampling, "multiplier", sampling.multiplier)

    def slower(*args: Any) -> None:
        sampling.multiplier *= 0.9

    model.add_callback_with_key(CallbacksMP.ON_PREPARE_STATE, "other", slower)


CHANGES = {
    forward_hook: "the hooks diffusion_model._forward_hooks",
    forward_pre_hook: "the hooks diffusion_model._forward_pre_hooks",
    forward: "the method diffusion_model.forward",
    apply_model: "the method apply_model",
    inner_apply_model: "the method _apply_model",
    process_timestep: "the method process_timestep",
    prepare_state: "the callback other",
}


@pytest.mark.parametrize(("change", "reason"), CHANGES.items(), ids=[change.__name__ for change in CHANGES])
def test_comfyuis_loop_runs_it(
    native: Any, load: Callable[..., Loaded], change: Callable[..., None], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    unchanged, ours, theirs = ksampler(native, empty_latent()), load().model.clone(), native.clone()
    for model, sample in ((ours, run_parallel_sampler), (theirs, ksampler)):
        with monkeypatch.context() as undo:
            change(model, undo)
            result = sample(model, empty_latent())
        if model is ours:
            text, samples = result.ui["text"][0], result.args[0]["samples"]
    assert f"a node added {reason} to the model's steps" in text
    assert relative_error(samples, result) < CLOSE
    assert relative_error(result, unchanged) > 10 * CLOSE


def test_what_is_added_after_sampling_began_is_refused(load: Callable[..., Loaded]) -> None:
    loaded = load()
    model = loaded.model.clone()

    def late(patcher: Any) -> None:
        patcher.model.diffusion_model.register_forward_hook(lambda module, args, answer: answer * torch.tensor(0.5))

    model.add_callback_with_key(CallbacksMP.ON_PRE_RUN, "other", late)
    with pytest.raises(InvalidRequest, match=r"^a node added the hooks .* after sampling began, .*: use KSampler$"):
        run_parallel_sampler(model, empty_latent())
    assert not loaded.client.work
