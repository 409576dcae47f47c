"""Picture and sound in one nested latent: what happens amid a run, previews, guiders, masks, and samplers in turn."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import comfy.cli_args
import comfy.model_management
import comfy.sample
import comfy.samplers
import comfy.utils
import numpy as np
import pytest
import torch
from any_folder_name.nodes.vae import ParallelVAEDecode
from any_folder_name.parallel_backend.errors import InvalidRequest
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from any_folder_name.parallel_backend.protocol.messages import Sample
from comfy.nested_tensor import NestedTensor
from comfy_extras import nodes_custom_sampler, nodes_lt
from helpers.freeing_client import FreeingClient
from helpers.inside_fixtures import Loaded, ksampler, native_case, parallel_sampler, relative_error
from natives import CASES

import nodes as core_nodes

CLOSE, FAR = 1e-4, 1e-2
NAMES = [name for name in ("ltx2 2", "minimax_h3 t2v") if name in CASES]
SAMPLERS = (ksampler, parallel_sampler)
PAIRS = list(zip(NAMES, SAMPLERS, strict=False))
"""Each model and each way of sampling once, for what takes long."""
LONG = 40
"""Steps of a run in which something happens."""
AT = 3
"""The step after which it happens."""
SHOWS_NESTED = "packed_callback" in comfy.samplers.CFGGuider.sample.__code__.co_cellvars
"""Whether this version of ComfyUI shows previews of them. Older ones take the packed latent for a picture."""


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    """A model of picture and sound."""
    given: str = request.param
    return given


def options_of(name: str, **changes: Any) -> dict[str, Any]:
    case = CASES[name]
    return {"positive": case.conditioning(1), "negative": case.conditioning(2, shorter=3), "cfg": case.cfg, **changes}


def start_of(name: str) -> dict[str, Any]:
    """Return a latent that is not empty."""
    random = torch.Generator().manual_seed(8)
    empty = CASES[name].samples()["samples"].unbind()
    return {"samples": NestedTensor([torch.randn(each.shape, generator=random) for each in empty])}


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None] = lambda: None) -> Iterator[list[Any]]:
    """Yield the updates of ComfyUI's progress bar: value, total and preview. Let something happen amid them."""
    updates: list[Any] = []

    def hook(value: int, total: int, preview: Any, node_id: Any = None) -> None:
        updates.append((value, total, preview))
        if len(updates) == AT:
            act()

    with monkeypatch.context() as patch:
        # Newer versions of ComfyUI drop updates that follow each other closely.
        patch.setattr(comfy.utils, "PROGRESS_THROTTLE_MIN_INTERVAL", 0.0, raising=False)
        patch.setattr(comfy.utils, "PROGRESS_BAR_HOOK", hook)
        yield updates


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the messages that reach the backend from now on."""
    messages, attempt = list[Any](), FreeingClient.attempt

    def noted(self: FreeingClient, message: Any, *args: Any, **options: Any) -> Any:
        messages.append(message)
        return attempt(self, message, *args, **options)

    monkeypatch.setattr(FreeingClient, "attempt", noted)
    return messages


@pytest.mark.newest
@pytest.mark.parametrize(("name", "sample"), PAIRS, indirect=["name"])
@pytest.mark.daily(1)
def test_an_interrupt_ends_a_run_and_the_next_one_is_whole(
    name: str, sample: Callable[..., Any], load_case: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, case = load_case(name, ParallelLayout(ulysses=2)), CASES[name]
    sample(model, case.samples(), **options_of(name, steps=1))
    with (
        watched(monkeypatch, comfy.model_management.interrupt_current_processing) as updates,
        pytest.raises(comfy.model_management.InterruptProcessingException),
    ):
        sample(model, case.samples(), **options_of(name, steps=5000))
    assert AT <= len(updates) < 5000
    assert not comfy.model_management.processing_interrupted()
    wanted = ksampler(native_case(name), case.samples(), **options_of(name))
    assert relative_error(sample(model, case.samples(), **options_of(name)), wanted) < CLOSE


@pytest.mark.newest
@pytest.mark.parametrize(("name", "sample"), PAIRS, indirect=["name"])
@pytest.mark.daily(1)
def test_a_run_goes_on_after_a_rank_is_killed(
    name: str,
    sample: Callable[..., Any],
    load_case: Callable[..., Any],
    backend: FreeingClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, killed = load_case(name, ParallelLayout(ulysses=2)), list[int]()
    sample(model, start_of(name), **options_of(name, steps=1))
    messages = recorded(monkeypatch)

    def kill() -> None:
        killed.append(backend.status().ranks[1].pid)
        os.kill(killed[0], signal.SIGKILL)

    options = options_of(name, steps=LONG, sampler_name="dpmpp_2m")
    with watched(monkeypatch, kill) as updates:
        found = sample(model, start_of(name), **options)
    assert relative_error(found, ksampler(native_case(name), start_of(name), **options)) < CLOSE
    assert [value for value, _, _ in updates] == list(range(1, LONG + 1)), "no step is taken twice"
    assert backend.status().ranks[1].pid not in killed
    loops = [message.first_step for message in messages if isinstance(message, Sample)]
    assert (len(loops), loops[1:] >= [AT]) == ((2, True) if sample is parallel_sampler else (0, False))


@pytest.mark.newest
@pytest.mark.parametrize(("name", "sample"), PAIRS, indirect=["name"])
@pytest.mark.daily(1)
def test_an_unload_amid_a_run_and_after_it(
    name: str,
    sample: Callable[..., Any],
    load_case: Callable[..., Any],
    backend: FreeingClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By another thread, since Parallel Sampler's waits for its run."""
    model, options = load_case(name, ParallelLayout(ulysses=2)), options_of(name, steps=LONG)
    unloading = threading.Thread(target=comfy.model_management.unload_all_models)
    with watched(monkeypatch, unloading.start):
        found = sample(model, CASES[name].samples(), **options)
    unloading.join(60)
    assert not unloading.is_alive()
    assert relative_error(found, ksampler(native_case(name), CASES[name].samples(), **options)) < CLOSE
    sample(model, CASES[name].samples(), **options_of(name))
    assert settled_loads(backend, name, loaded=True)
    comfy.model_management.unload_all_models()
    assert settled_loads(backend, name, loaded=False)


def settled_loads(client: FreeingClient, folder: str, *, loaded: bool) -> bool:
    """Return whether the first rank says in time that it has loaded, or unloaded, a model."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        if any(model.path.endswith(f"/{folder}") for model in client.status().ranks[0].models) == loaded:
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("sample", SAMPLERS)
def test_previews_show_the_picture_as_comfyuis_do(
    name: str, sample: Callable[..., Any], load_case: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comfy.cli_args.args, "preview_method", comfy.cli_args.LatentPreviewMethod.Latent2RGB)
    options = options_of(name, steps=4)
    with watched(monkeypatch) as ours:
        sample(load_case(name, ParallelLayout(ulysses=2)), start_of(name), **options)
    assert [(value, total) for value, total, _ in ours] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    if SHOWS_NESTED:
        with watched(monkeypatch) as wanted:
            ksampler(native_case(name), start_of(name), **options)
        for (_, _, mine), (_, _, theirs) in zip(ours, wanted, strict=True):
            assert mine[1].size == theirs[1].size == CASES[name].latent[:-3:-1]
            assert np.abs(np.asarray(mine[1], int) - np.asarray(theirs[1], int)).max() <= 1


@pytest.mark.parametrize("sample", SAMPLERS)
def test_a_mask_of_the_picture_alone(name: str, sample: Callable[..., Any], load_case: Callable[..., Any]) -> None:
    """The sound is made anew then. A mask of another size is resized."""
    mask = torch.zeros(1, 1, 30, 40)
    mask[..., 13:] = 1.0
    latent = start_of(name) | {"noise_mask": mask}
    wanted = ksampler(native_case(name), latent, **options_of(name))
    assert relative_error(ksampler(native_case(name), start_of(name), **options_of(name)), wanted) > FAR
    for layout in ("ulysses=2", "cfg=2"):
        model = load_case(name, ParallelLayout.parse(layout))
        assert relative_error(sample(model, latent, **options_of(name)), wanted) < CLOSE


@pytest.mark.skipif("ltx2 2" not in CASES, reason="MiniMax-H3 makes one video at a time")
@pytest.mark.parametrize("sample", SAMPLERS)
def test_some_of_a_batch(sample: Callable[..., Any], load_case: Callable[..., Any]) -> None:
    latent = start_of("ltx2 2") | {"batch_index": [3, 1]}
    options = options_of("ltx2 2", denoise=0.6, steps=5, sampler_name="heun")
    wanted = ksampler(native_case("ltx2 2"), latent, **options)
    for layout in ("data=2", "ring=2"):
        model = load_case("ltx2 2", ParallelLayout.parse(layout))
        assert relative_error(sample(model, latent, **options), wanted) < CLOSE


def basic(model: Any, name: str) -> Any:
    guider = nodes_custom_sampler.Guider_Basic(model)
    guider.set_conds(CASES[name].conditioning(1))
    return guider


def with_cfg(model: Any, name: str) -> Any:
    guider = comfy.samplers.CFGGuider(model)
    guider.set_conds(CASES[name].conditioning(1), CASES[name].conditioning(2, shorter=3))
    guider.set_cfg(3.0)
    return guider


def dual_cfg(model: Any, name: str) -> Any:
    guider = nodes_custom_sampler.Guider_DualCFG(model)
    guider.set_conds(*(CASES[name].conditioning(seed, shorter=seed) for seed in range(3)))
    guider.set_cfg(4.0, 2.0)
    return guider


def of_each_stream(model: Any, name: str) -> Any:
    guider = nodes_lt.Guider_LTXAVDualCFG(model)
    guider.set_conds(CASES[name].conditioning(1), CASES[name].conditioning(2, shorter=3))
    guider.set_cfg(3.0, 5.0)
    return guider


GUIDERS = [basic, with_cfg, dual_cfg, *([of_each_stream] if hasattr(nodes_lt, "Guider_LTXAVDualCFG") else [])]


@pytest.mark.parametrize("guider", GUIDERS)
def test_guiders_give_both_outputs(guider: Callable[..., Any], name: str, load_case: Callable[..., Any]) -> None:
    def outputs(model: Any) -> list[Any]:
        sigmas = nodes_custom_sampler.BasicScheduler.execute(model, "simple", 4, 0.8).args[0]
        noise, sampler = nodes_custom_sampler.Noise_RandomNoise(4), comfy.samplers.sampler_object("euler")
        node = nodes_custom_sampler.SamplerCustomAdvanced
        found = node.execute(noise, guider(model, name), sampler, sigmas, start_of(name))
        return [each["samples"] for each in found.args]

    wanted = outputs(native_case(name))
    ours = outputs(load_case(name, ParallelLayout(ulysses=2)))
    assert all(relative_error(mine, theirs) < CLOSE for mine, theirs in zip(ours, wanted, strict=True))


@pytest.mark.skipif(
    not hasattr(comfy.sample, "prepare_empty_noise"), reason="this ComfyUI's KSamplerAdvanced cannot add no noise here"
)
def test_one_sampler_goes_on_where_another_stopped(name: str, load_case: Callable[..., Any]) -> None:
    """The first leaves noise, the second adds none, and the third begins at a later step."""

    def run(model: Any) -> list[Any]:
        latent, found = start_of(name), []
        for start, end, noise in ((0, 3, "enable"), (3, 5, "disable"), (4, 6, "enable")):
            options = options_of(name)
            (latent,) = core_nodes.KSamplerAdvanced().sample(
                model, noise, 7, 6, options["cfg"], "euler", "simple", options["positive"], options["negative"], latent,
                start, end, "disable" if end == 6 else "enable",
            )  # fmt: skip
            found.append(latent["samples"])
        return found

    wanted, model = run(native_case(name)), load_case(name, ParallelLayout(ulysses=2))
    for mine, theirs in zip(run(model), wanted, strict=True):
        assert relative_error(mine, theirs) < CLOSE
    whole = ksampler(native_case(name), wanted_start := {"samples": wanted[1]}, **options_of(name, denoise=0.5))
    ours = parallel_sampler(model, wanted_start, **options_of(name, denoise=0.5))
    assert relative_error(ours, whole) < CLOSE


@pytest.mark.skipif("minimax_h3 t2v" not in CASES, reason="this version of ComfyUI has no MiniMax-H3")
@pytest.mark.parametrize("sample", SAMPLERS)
def test_an_empty_latent_of_the_picture_gets_its_sound_as_in_comfyui(
    sample: Callable[..., Any], load_case: Callable[..., Any]
) -> None:
    """Of MiniMax-H3, whose latent format does it."""
    latent, options = {"samples": torch.zeros(1, 4, 2, 6, 8)}, options_of("minimax_h3 t2v")
    wanted = ksampler(native_case("minimax_h3 t2v"), latent, **options)
    assert wanted.is_nested
    ours = sample(load_case("minimax_h3 t2v", ParallelLayout(ulysses=2)), latent, **options)
    assert relative_error(ours, wanted) < CLOSE


@pytest.mark.parametrize("sample", SAMPLERS)
def test_a_latent_of_another_number_of_tensors_is_refused_with_the_node_that_would_work(
    name: str, sample: Callable[..., Any], load_case: Callable[..., Any], load: Callable[..., Loaded]
) -> None:
    both = start_of(name)
    picture, sound = both["samples"].unbind()
    maker = {"ltx2 2": "LTXVConcatAVLatent", "minimax_h3 t2v": "EmptyMiniMaxH3LatentAV"}[name]
    model = load_case(name, ParallelLayout())
    for latent, count in ((picture, 1), (NestedTensor([picture, sound, sound]), 3)):
        with pytest.raises(InvalidRequest, match=f"takes a latent of 2 tensors, and this one has {count}: use {maker}"):
            sample(model, {"samples": latent}, **options_of(name))
    loaded = load()
    with pytest.raises(InvalidRequest, match=r"and tiny takes one: pass the video's, which LTXVSeparateAVLatent gives"):
        sample(loaded.model, both)
    assert not loaded.client.work


@pytest.mark.parametrize("sample", SAMPLERS)
@pytest.mark.parametrize("broken", ["channels", "sound", "picture is NaN", "sound is NaN"])
def test_tensors_that_do_not_fit_are_refused(
    name: str, sample: Callable[..., Any], broken: str, load_case: Callable[..., Any]
) -> None:
    picture, sound = start_of(name)["samples"].unbind()
    latent, message = {
        "channels": ((picture[:, :5], sound), "has 5 channels"),
        "sound": ((picture, sound[:, :5]), r"audio_hidden_states of shape|takes \[batch, 32, 2, times\]"),
        "picture is NaN": ((picture * torch.nan, sound), "NaN"),
        "sound is NaN": ((picture, sound * torch.nan), "NaN"),
    }[broken]
    with pytest.raises(InvalidRequest, match=message):
        sample(load_case(name, ParallelLayout()), {"samples": NestedTensor(latent)}, **options_of(name))


def test_a_vae_takes_the_picture_alone(loaded: Loaded) -> None:
    latent = NestedTensor([torch.randn(1, 16, 1, 4, 4), torch.zeros(1, 8, 5, 16)])
    decoded = ParallelVAEDecode.execute({"samples": latent}, loaded.vae).args[0]
    assert torch.equal(decoded, core_nodes.VAEDecode().decode(loaded.vae, {"samples": latent})[0])
    with pytest.raises(InvalidRequest, match=r"and this VAE takes one: pass the video's, which LTXVSeparateAVLatent"):
        loaded.vae.decode_tiled(latent)
