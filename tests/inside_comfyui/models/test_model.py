"""Our MODEL within ComfyUI: memory, clones, LoRA and other nodes' wrappers."""

import dataclasses
import gc
import weakref
from collections.abc import Callable
from typing import Any

import comfy.lora
import comfy.model_base
import comfy.model_management
import comfy.model_patcher
import comfy.samplers
import comfy_extras.nodes_custom_sampler
import pytest
import torch
from any_folder_name.nodes.backend import connection, session
from any_folder_name.parallel_backend.errors import Cancelled, InvalidRequest, RankFailed
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from comfy_extras.nodes_easycache import EasyCacheNode
from comfy_extras.nodes_perpneg import Guider_PerpNeg
from helpers.inside_fixtures import (
    Loaded,
    conditioning,
    empty_latent,
    ksampler,
    parallel_sampler,
    relative_error,
)


def test_class_names_and_shapes_are_comfyuis_own(native: Any, loaded: Loaded) -> None:
    ours, theirs = loaded.model.model.state_dict(), native.model.state_dict()
    assert isinstance(loaded.model.model, comfy.model_base.WAN21)
    assert {name: tensor.shape for name, tensor in ours.items()} == {name: t.shape for name, t in theirs.items()}
    assert {t.device.type for name, t in ours.items() if name.startswith("diffusion_model.")} == {"meta"}
    lora_keys = comfy.lora.model_lora_keys_unet(native.model, {})
    assert lora_keys == comfy.lora.model_lora_keys_unet(loaded.model.model, {})


def test_none_of_comfyuis_models_is_evicted(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    # ComfyUI frees nothing on torch.device("cpu"). With an index it is another, equally usable device to ComfyUI.
    device = torch.device("cpu", 0)

    def no_memory(dev: Any = None, torch_free_too: bool = False) -> Any:
        return (0, 0) if torch_free_too else 0

    other_model = comfy.model_patcher.ModelPatcher(torch.nn.Linear(64, 64), load_device=device, offload_device=device)
    entry = comfy.model_management.LoadedModel(other_model)
    entry.real_model = lambda: other_model.model
    unloaded: list[Any] = []
    monkeypatch.setattr(entry, "model_unload", lambda *args, **kwargs: unloaded.append(args))
    monkeypatch.setattr(comfy.model_management, "current_loaded_models", [entry])
    monkeypatch.setattr(comfy.model_management, "get_free_memory", no_memory)
    clone = loaded.model.clone()
    clone.load_device = device
    assert (clone.model_size(), clone.loaded_size(), clone.memory_required((1, 16, 1, 6, 6))) == (0, 0, 0)
    assert clone.model.memory_required((2, 16, 1, 6, 6), cond_shapes={}) == 0
    loaded.clip.encode_from_tokens(loaded.clip.tokenize("a red circle"))
    latent = ksampler(clone, empty_latent())
    loaded.vae.decode(parallel_sampler(clone, {"samples": latent}))
    assert unloaded == []
    comfy.model_management.free_memory(1, device)
    assert len(unloaded) == 1, "this stand-in device would have shown an eviction"


def test_unloading_reaches_the_ranks(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comfy.model_management, "current_loaded_models", [])
    ksampler(loaded.model, empty_latent())
    ksampler(loaded.model.clone(), empty_latent())
    assert not loaded.client.of_kind("Unload")
    comfy.model_management.unload_all_models()
    assert len(loaded.client.of_kind("Unload")) == 1
    ksampler(loaded.model, empty_latent())


def test_unloading_reaches_ranks_that_only_encoded_or_decoded(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comfy.model_management, "current_loaded_models", [])
    latent = empty_latent()["samples"]
    uses = [
        lambda: loaded.vae.decode(latent),
        lambda: loaded.vae.encode(torch.zeros(1, 32, 32, 3)),
        lambda: loaded.clip.encode_from_tokens(loaded.clip.tokenize("a red circle")),
    ]
    for count, use in enumerate(uses, start=1):
        use()
        use()
        comfy.model_management.unload_all_models()
        assert len(loaded.client.of_kind("Unload")) == count


def test_ranks_that_die_as_they_unload_hold_no_weights(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    def die(*args: Any, **options: Any) -> Any:
        raise RankFailed("rank 0 (pid 7) was killed by SIGKILL")

    monkeypatch.setattr(connection, "show_on_node", lambda node_id, text: shown.append(text))
    monkeypatch.setattr(loaded.client, "attempt", die)
    dataclasses.replace(loaded.model.model.diffusion_model.handle, node_id="7").unload()
    assert shown[-1].endswith("unloaded; weights load at next use")


@pytest.mark.parametrize(
    ("kind", "values"),
    [(comfy_extras.nodes_custom_sampler.Guider_DualCFG, (4.0, 3.0)), (Guider_PerpNeg, (1.0, 0.5))],
)
def test_custom_guiders_get_all_their_prompts(
    load: Callable[..., Loaded], kind: type, values: tuple[float, float]
) -> None:
    loaded = load(layout=ParallelLayout(cfg=2))
    guider = kind(loaded.model)
    guider.set_conds(conditioning(1), conditioning(2), conditioning(3))
    guider.set_cfg(*values)
    noise = torch.randn(1, 16, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    sampler = comfy.samplers.sampler_object("euler")
    guider.sample(noise, torch.zeros_like(noise), sampler, torch.tensor([1.0, 0.5, 0.0]), disable_pbar=True)
    assert [message.branches for message in loaded.client.of_kind("Forward")] == [3, 3]


def test_a_cfg_layout_needs_as_many_prompts(load: Callable[..., Loaded]) -> None:
    with pytest.raises(InvalidRequest, match=r"only one prompt\): raise the sampler.s cfg"):
        ksampler(load(layout=ParallelLayout(cfg=2)).model, empty_latent(), cfg=1.0)
    with pytest.raises(InvalidRequest, match="has 2 prompts, so cfg can be at most 2"):
        ksampler(load(layout=ParallelLayout(cfg=3), devices="0,1,2").model, empty_latent())


def test_merge_save_and_layer_patches_are_refused(loaded: Loaded) -> None:
    clone = loaded.model.clone()
    assert clone.add_patches({"diffusion_model.of_another_model.weight": ("diff", ())}) == []
    with pytest.raises(InvalidRequest, match="merged or saved"):
        clone.get_key_patches("diffusion_model.")
    with pytest.raises(InvalidRequest, match="saved"):
        clone.model.state_dict_for_saving(None)
    with pytest.raises(RuntimeError, match="several GPUs"):
        clone.deepclone_multigpu(torch.device("cpu"))
    clone.set_model_attn2_patch(lambda *args: args)
    with pytest.raises(InvalidRequest, match="patches"):
        ksampler(clone, empty_latent())
    assert not loaded.client.work


def test_other_nodes_wrappers_see_real_predictions_once(native: Any, loaded: Loaded) -> None:
    predictions: list[torch.Tensor] = []

    def halve(executor: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        out = executor(*args, **kwargs)
        predictions.append(out)
        return out * 0.5

    results = []
    for model in (native.clone(), loaded.model.clone()):
        model.add_wrapper_with_key(comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL, "halve", halve)
        results.append(ksampler(model, empty_latent(), steps=2))
    assert relative_error(results[1], results[0]) < 1e-4
    assert len(predictions) == 4
    assert all(out.abs().max() > 0 for out in predictions)
    assert len(loaded.client.of_kind("Forward")) == 2


def test_easycache_and_custom_sampling_with_three_prompts(native: Any, loaded: Loaded) -> None:
    results = []
    for model in (native, loaded.model):
        cached = EasyCacheNode.execute(model, 3.0, 0.1, 0.9, False).args[0]
        guider = comfy_extras.nodes_custom_sampler.Guider_DualCFG(cached)
        guider.set_conds(conditioning(1), conditioning(2, length=20), conditioning(3))
        guider.set_cfg(4.0, 3.0)
        noise = torch.randn(1, 16, 1, 6, 6, generator=torch.Generator().manual_seed(0))
        sampler = comfy.samplers.sampler_object("euler")
        schedule = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", 8)
        results.append(guider.sample(noise, torch.zeros_like(noise), sampler, schedule, disable_pbar=True))
    forwards = loaded.client.of_kind("Forward")
    assert relative_error(results[1], results[0]) < 1e-4
    assert [message.branches for message in forwards] == [3] * len(forwards)
    assert len(forwards) < 8, "EasyCache skipped no step"


def test_a_step_that_a_cache_skips_sends_nothing(loaded: Loaded) -> None:
    cached = loaded.model.clone()
    cached.add_wrapper_with_key("diffusion_model", "skip", lambda executor, x, *args, **kwargs: torch.zeros_like(x))
    ksampler(cached, empty_latent())
    assert not loaded.client.work


def test_a_wrapper_that_changes_the_input_gets_its_prediction(native: Any, loaded: Loaded) -> None:
    results = []
    for model in (native.clone(), loaded.model.clone()):
        model.set_model_unet_function_wrapper(
            lambda apply, args: apply(args["input"] * 0.9, args["timestep"], **args["c"])
        )
        results.append(ksampler(model, empty_latent(), steps=2))
    assert relative_error(results[1], results[0]) < 1e-4


def test_an_interrupt_raises_comfyuis_own_exception(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:

    def cancelled(*args: Any, interrupted: Any, **kwargs: Any) -> Any:
        comfy.model_management.interrupt_current_processing()
        assert interrupted()
        raise Cancelled("cancelled")

    monkeypatch.setattr(loaded.client, "attempt", cancelled)
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        ksampler(loaded.model, empty_latent())
    assert not comfy.model_management.processing_interrupted()


def test_out_of_memory_raises_comfyuis_own_exception(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    from any_folder_name.parallel_backend.errors import OutOfMemory

    def out_of_memory(*args: Any, **kwargs: Any) -> Any:
        raise OutOfMemory("rank 1 is out of memory")

    monkeypatch.setattr(loaded.client, "attempt", out_of_memory)
    with pytest.raises(comfy.model_management.OOM_EXCEPTION, match="rank 1"):
        ksampler(loaded.model, empty_latent())


def test_weights_are_freed_with_the_last_holder_of_a_model(loaded: Loaded) -> None:
    session.use(session.Session(loaded.client))
    handle = loaded.model.model.diffusion_model.handle
    spec = dataclasses.replace(handle.spec, path="/dropped")
    holders = [dataclasses.replace(handle, spec=spec) for _ in range(2)]
    for holder in holders:
        holder.keep_weights()
    del holder, holders[0]
    session.current().held.free_dropped()
    assert not loaded.client.of_kind("Unload")
    holders.clear()
    session.current().held.free_dropped()
    assert [message.model.path for message in loaded.client.of_kind("Unload")] == ["/dropped"]


def test_only_the_outputs_hold_a_model(load: Callable[..., Loaded]) -> None:
    loaded = load()
    handle = weakref.ref(loaded.model.model.diffusion_model.handle)
    ksampler(loaded.model, empty_latent(), steps=1)
    del loaded
    gc.collect()
    assert handle() is None
