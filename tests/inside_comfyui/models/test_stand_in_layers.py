"""What nodes do to the layers that they find in a MODEL is refused: the layers that compute are in the ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from any_folder_name.parallel_backend.errors import InvalidRequest
from comfy.patcher_extension import CallbacksMP, WrappersMP
from helpers.inside_fixtures import Loaded, empty_latent, ksampler, parallel_sampler
from natives import FIRST

Change = Callable[[Any], Any]
LAYER = "blocks.0.self_attn.q"
END = "the layers of a parallel model run in the backend's processes: remove that node"


def layer_of(model: Any) -> Any:
    return dict(model.model.diffusion_model.named_modules())[LAYER]


class Halving(torch.nn.Linear):
    """Halves what a layer computes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See ``torch.nn.Linear``."""
        return super().forward(x) * 0.5


def set_data(layer: Any) -> None:
    layer.weight.data = layer.weight.data * 2


def set_item(layer: Any) -> None:
    layer.weight[0] = 1


REFUSED: dict[str, tuple[Change, str]] = {
    "data in place": (lambda layer: layer.weight.data.mul_(2), "changes a weight in place (mul)"),
    "in place": (lambda layer: layer.weight.detach().view(-1).add_(1), "changes a weight in place (add)"),
    "init": (lambda layer: torch.nn.init.zeros_(layer.weight), "changes a weight in place (zero)"),
    "data": (set_data, "changes a weight in place (set)"),
    "item": (set_item, "changes a weight in place (setitem)"),
    "call": (lambda layer: layer(torch.ones(1, 48)), f"calls the layer {LAYER}"),
    "load": (lambda layer: layer.load_state_dict({}), f"loads weights into the layer {LAYER}"),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED)
def test_what_needs_the_weights_is_refused_at_once(loaded: Loaded, change: Change, message: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        change(layer_of(loaded.model))
    assert str(error.value).startswith(f"a node {message}; {END}")
    ksampler(loaded.model, empty_latent(), steps=1)


def test_weights_can_be_looked_at(loaded: Loaded) -> None:
    weight = layer_of(loaded.model).weight
    assert weight.shape == weight.data.shape == (weight.float() * 2).shape
    assert isinstance(weight, torch.nn.Parameter)
    assert weight.device.type == "meta"
    weight.requires_grad_(False)
    ksampler(loaded.model, empty_latent(), steps=1)


@pytest.mark.parametrize("sample", [ksampler, parallel_sampler])
def test_another_class_is_refused(load: Callable[..., Loaded], sample: Callable[..., Any]) -> None:
    loaded = load()
    layer = layer_of(loaded.model)
    layer.__class__ = type("Halving", (Halving, type(layer)), {})
    with pytest.raises(InvalidRequest, match=f"^a node wraps or replaces the layer {LAYER}; {END}"):
        sample(loaded.model, empty_latent())
    assert not loaded.client.work


def test_layers_are_found_by_name(native: Any, loaded: Loaded) -> None:
    ours, theirs = loaded.model.model.diffusion_model, native.model.diffusion_model
    assert ours.get_submodule("") is ours
    assert type(ours.get_submodule(LAYER)) is type(theirs.get_submodule(LAYER))
    assert ours.get_parameter(f"{LAYER}.weight").shape == theirs.get_parameter(f"{LAYER}.weight").shape
    for find, name in ((ours.get_submodule, "blocks.9"), (ours.get_parameter, LAYER), (ours.get_buffer, "freqs")):
        with pytest.raises(AttributeError, match=f"^a node uses diffusion_model.{name}; {END}"):
            find(name)


def test_a_layer_is_of_comfyuis_class_and_as_long(native: Any, loaded: Loaded) -> None:
    for name, theirs in native.model.diffusion_model.named_modules(prefix="diffusion_model"):
        ours = loaded.model.get_model_object(name)
        assert isinstance(ours, type(theirs)), name
        assert bool(ours) == bool(theirs), name
        assert ours == loaded.model.get_model_object(name)
        assert hash(ours) == hash(loaded.model.get_model_object(name))
        if isinstance(theirs, torch.nn.ModuleList | torch.nn.Sequential):
            assert len(ours) == len(theirs)
            assert all(isinstance(layer, type(their_layer)) for layer, their_layer in zip(ours, theirs, strict=True))
            assert ours[-1:] == [ours[len(theirs) - 1]]
        else:
            with pytest.raises(TypeError):
                len(ours)
    assert loaded.model.model.diffusion_model.blocks[0] != loaded.model.model.diffusion_model.blocks[1]


@pytest.mark.parametrize("name", FIRST)
def test_what_modules_answer_without_weights(load_case: Callable[..., Any], name: str) -> None:
    model = load_case(name, None).model
    transformer = model.diffusion_model
    channels_last = {"memory_format": torch.channels_last}
    assert transformer.requires_grad_(False) is transformer
    assert transformer.eval() is transformer.to("cpu") is transformer.to(**channels_last) is transformer
    assert model.to("cpu") is model.share_memory() is model
    assert list(transformer.parameters()) == list(transformer.buffers()) == []
    assert transformer.changed_layer() is None


@pytest.mark.parametrize("strict", [True, False])
def test_loading_weights_is_refused(loaded: Loaded, strict: bool) -> None:
    with pytest.raises(InvalidRequest, match=f"^a node loads weights into the model; {END}"):
        loaded.model.model.diffusion_model.load_state_dict({"blocks.0": torch.zeros(1)}, strict=strict)
    with pytest.raises(InvalidRequest, match=r"^a node loads weights into the model"):
        loaded.model.model.load_model_weights({}, "")


def wrap_layers(model: Any) -> None:
    for layer in model.model.diffusion_model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.forward = lambda *args, inner=layer.forward: inner(*args) * 0.5


def in_outer_sample(model: Any) -> None:
    def outer(executor: Any, *args: Any, **options: Any) -> Any:
        wrap_layers(executor.class_obj.model_patcher)
        return executor(*args, **options)

    model.add_wrapper_with_key(WrappersMP.OUTER_SAMPLE, "other", outer)


def in_prepare_sampling(model: Any) -> None:
    def prepare(executor: Any, patcher: Any, *args: Any, **options: Any) -> Any:
        wrap_layers(patcher)
        return executor(patcher, *args, **options)

    model.add_wrapper_with_key(WrappersMP.PREPARE_SAMPLING, "other", prepare)


def in_sampler_sample(model: Any) -> None:
    def sample(executor: Any, guider: Any, *args: Any, **options: Any) -> Any:
        wrap_layers(guider.model_patcher)
        return executor(guider, *args, **options)

    model.add_wrapper_with_key(WrappersMP.SAMPLER_SAMPLE, "other", sample)


def in_apply_model(model: Any) -> None:
    def apply(executor: Any, *args: Any, **options: Any) -> Any:
        wrap_layers(model)
        return executor(*args, **options)

    model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "other", apply)


def in_a_callback(model: Any) -> None:
    model.add_callback_with_key(CallbacksMP.ON_PRE_RUN, "other", wrap_layers)


@pytest.mark.parametrize("sample", [ksampler, parallel_sampler])
@pytest.mark.parametrize(
    "change", [in_outer_sample, in_prepare_sampling, in_sampler_sample, in_apply_model, in_a_callback]
)
def test_layers_that_are_wrapped_while_sampling_begins_are_refused(
    load: Callable[..., Loaded], sample: Callable[..., Any], change: Callable[..., None]
) -> None:
    loaded = load()
    model = loaded.model.clone()
    ksampler(model, empty_latent(), steps=1)
    loaded.client.requests.clear()
    change(model)
    with pytest.raises(InvalidRequest, match=f"^a node wraps or replaces the layer text_embedding.*; {END}"):
        sample(model, empty_latent())
    assert not loaded.client.work
