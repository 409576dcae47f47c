"""LoRAs on a parallel MODEL against the same LoRAs on ComfyUI's own."""

from collections.abc import Callable, Iterable
from typing import Any

import comfy.hooks
import comfy.lora
import comfy.sd
import node_helpers
import pytest
import torch
from any_folder_name.nodes.remote.sealed_file import SealedFile
from any_folder_name.parallel_backend.errors import InvalidRequest
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from helpers import loras
from helpers.inside_fixtures import Loaded, ksampler, parallel_sampler, relative_error
from natives import CASES, FIRST

CLOSE = 1e-4
LAYOUTS = ("ulysses=2", "tensor=2", "ulysses=2 shard_weights", "pipe=2 patches=1", "cfg=2")
NAMES = [name for name in FIRST if not name.startswith(("mochi", "cogvideox", "chroma"))]
"""Those that are quick. The grid has all."""


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.daily(3)
def test_two_loras_equal_comfyui(name: str, load_case: Callable[..., Any]) -> None:
    place = NAMES.index(name)
    case = CASES[name]
    native = case.native()  # ComfyUI changes its weights in place
    latent, options = case.samples(), loras.options_of(case)
    dialects = sorted(loras.targets(native))
    first, second = dialects[place % len(dialects)], dialects[(place + 1) % len(dialects)]
    changes = (
        (loras.plain(native, first, rank=4, seed=1, alpha=3.0), 0.7),
        (loras.plain(native, second, rank=7, seed=2), -0.4),
    )
    unchanged = ksampler(case.patch(native), latent, **options)
    reference = ksampler(case.patch(loras.on_model(native, *changes)), latent, **options)
    assert relative_error(unchanged, reference) > 100 * CLOSE
    layout = ParallelLayout.parse(LAYOUTS[place % len(LAYOUTS)])
    model = case.patch(loras.on_model(load_case(name, layout), *changes))
    sample = parallel_sampler if place % 2 else ksampler
    error = relative_error(sample(model, latent, **options), reference)
    assert error < CLOSE, f"{first} and {second}, {layout}: {error:.1e}"


@pytest.mark.parametrize(("name", "make"), [(name, make) for name, all_ in loras.CONVERTED.items() for make in all_])
def test_names_that_comfyui_converts_equal_comfyui(
    name: str, make: Callable[..., loras.Lora], load_case: Callable[..., Any]
) -> None:
    case = CASES[name]
    native, latent, options = case.native(), case.samples(), loras.options_of(case)
    change = (make(native, rank=3, seed=1), 0.5)
    reference = ksampler(case.patch(loras.on_model(native, change)), latent, **options)
    remote = case.patch(load_case(name, ParallelLayout.parse("tensor=2")))
    assert relative_error(ksampler(remote, latent, **options), reference) > 100 * CLOSE
    assert relative_error(ksampler(loras.on_model(remote, change), latent, **options), reference) < CLOSE


@pytest.mark.newest
@pytest.mark.parametrize("form", range(len(loras._FORMS)))
def test_every_form_of_factors_names_equals_the_first_one(form: int, load_case: Callable[..., Any]) -> None:
    case, remote = CASES["sd3 medium"], load_case("sd3 medium", ParallelLayout.parse("ulysses=2"))
    files = [loras.plain(case.native(), "diffusion_model.", rank=3, seed=1, form=each) for each in (0, form)]
    results = [
        ksampler(loras.on_model(remote, (file, 0.5)), case.samples(), **loras.options_of(case)) for file in files
    ]
    assert torch.equal(*results)


@pytest.mark.newest
@pytest.mark.parametrize("kind", loras.KINDS)
@pytest.mark.daily(1)
def test_other_kinds_beside_a_lora_equal_comfyui(kind: str, load_case: Callable[..., Any]) -> None:
    name = NAMES[loras.KINDS.index(kind)]
    case = CASES[name]
    native, latent, options = case.native(), case.samples(), loras.options_of(case)
    unchanged = ksampler(case.patch(native), latent, **options)
    changes = ((loras.plain(native, "lora_unet_", rank=3, seed=1), 0.5), (loras.other(native, kind, seed=2), 0.8))
    reference = ksampler(case.patch(loras.on_model(native, *changes)), latent, **options)
    assert relative_error(unchanged, reference) > 100 * CLOSE
    for layout, sample in zip(LAYOUTS[:4], (ksampler, parallel_sampler) * 2, strict=True):
        remote = case.patch(load_case(name, ParallelLayout.parse(layout)))
        error = relative_error(sample(loras.on_model(remote, *changes), latent, **options), reference)
        assert error < CLOSE, f"{layout}: {error:.1e}"
        assert relative_error(sample(remote, latent, **options), unchanged) < CLOSE


@pytest.mark.parametrize("kind", ["dora", "lokr", "diff"])
def test_a_pack_with_an_older_calculate_weight_equals_comfyui(
    kind: str, load_case: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    core = comfy.lora.calculate_weight

    def older(patches: Any, weight: Any, key: str, intermediate_dtype: Any = torch.float32) -> Any:
        return core(patches, weight, key, intermediate_dtype)

    case = CASES["wan t2v"]
    native, latent, options = case.native(), case.samples(), loras.options_of(case)
    change = (loras.other(native, kind, seed=2), 0.8)
    reference = ksampler(loras.on_model(native, change), latent, **options)
    remote = load_case("wan t2v", ParallelLayout.parse("ulysses=2"))
    assert relative_error(ksampler(remote, latent, **options), reference) > 100 * CLOSE
    with monkeypatch.context() as pack:
        pack.setattr(comfy.lora, "calculate_weight", older)
        changed = loras.on_model(remote, change)
        assert relative_error(ksampler(changed, latent, **options), reference) < CLOSE
    assert relative_error(ksampler(changed, latent, **options), reference) < CLOSE


@pytest.mark.parametrize("kind", ["plain", "dora"])
def test_hooks_change_some_prompts_and_steps(kind: str, load_case: Callable[..., Any]) -> None:
    name = "sd3 medium"
    case = CASES[name]
    native, latent = case.native(), case.samples()
    lora = loras.plain(native, "lora_unet_", rank=3, seed=1) if kind == "plain" else loras.other(native, kind, seed=1)
    base = (loras.plain(native, "diffusion_model.", rank=2, seed=2), 0.6)
    hooks = comfy.hooks.create_hook_lora(lora, 0.9, 0.0)
    keyframes = comfy.hooks.HookKeyframeGroup()
    for strength, start in ((1.0, 0.0), (0.4, 0.5)):
        keyframes.add(comfy.hooks.HookKeyframe(strength=strength, start_percent=start))
    hooks.set_keyframes_on_hooks(keyframes)
    options = loras.options_of(case)
    hooked = options | {"positive": node_helpers.conditioning_set_values(options["positive"], {"hooks": hooks})}
    reference = ksampler(loras.on_model(native, base), latent, steps=4, **hooked)
    assert relative_error(ksampler(loras.on_model(native, base), latent, steps=4, **options), reference) > 100 * CLOSE
    for layout in ("ulysses=2", "cfg=2"):
        remote = loras.on_model(load_case(name, ParallelLayout.parse(layout)), base)
        before = remote.target.changes
        error = relative_error(ksampler(remote, latent, steps=4, **hooked), reference)
        assert remote.target.changes is before
        assert error < CLOSE, f"{layout}: {error:.1e}"


def test_another_strength_makes_no_file(load_case: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    case, remote = CASES["sd3 medium"], load_case("sd3 medium", ParallelLayout.parse("ulysses=2"))
    options, every_layer = loras.options_of(case), loras.plain(case.native(), "diffusion_model.", rank=3, seed=9)
    lora = {name: each for name, each in every_layer.items() if "joint_blocks" in name}  # no convolution
    filled: list[int] = []
    fill = SealedFile.fill

    def counted(file: SealedFile, tensors: Iterable[torch.Tensor]) -> None:
        filled.append(file.nbytes)
        fill(file, tensors)

    monkeypatch.setattr(SealedFile, "fill", counted)
    results = [ksampler(loras.on_model(remote, (lora, each)), case.samples(), **options) for each in (0.5, 0.8, -0.3)]
    assert filled == [sum(tensor.nbytes for tensor in lora.values())]
    assert relative_error(results[0], results[1]) > 100 * CLOSE


def test_a_factor_of_weights_equals_comfyui(load_case: Callable[..., Any]) -> None:
    """UNetSelfAttentionMultiply and its kind change no more than that."""
    case = CASES["wan t2v"]
    native, latent, options = case.native(), case.samples(), loras.options_of(case)

    def halved(model: Any) -> Any:
        model = model.clone()
        names = [name for name in model.model.state_dict() if name.endswith("self_attn.v.weight")]
        assert sorted(model.add_patches(dict.fromkeys(names, (None,)), 0.0, 0.5)) == sorted(names)
        return model

    unchanged = ksampler(native, latent, **options)
    reference = ksampler(halved(native), latent, **options)
    assert relative_error(unchanged, reference) > 10 * CLOSE
    remote = halved(load_case("wan t2v", ParallelLayout.parse("ulysses=2")))
    assert relative_error(ksampler(remote, latent, **options), reference) < CLOSE


@pytest.mark.newest
@pytest.mark.skipif(not loras.HAS_BYPASS, reason="not in this version of ComfyUI")
@pytest.mark.parametrize("kind", ["plain", "lokr", "loha"])
@pytest.mark.daily(1)
def test_bypassed_loras_equal_comfyui(kind: str, load_case: Callable[..., Any]) -> None:
    name = NAMES[loras.KINDS.index(kind) if kind in loras.KINDS else 0]
    case = CASES[name]
    native, latent, options = case.native(), case.samples(), loras.options_of(case)
    merged = (loras.plain(native, "lora_unet_", rank=3, seed=1), 0.5)
    first = loras.plain(native, "diffusion_model.", rank=5, seed=2, alpha=2.0)
    second = first if kind == "plain" else loras.other(native, kind, seed=3)

    def changed(model: Any) -> Any:
        model = loras.bypassed(loras.on_model(case.patch(model), merged), first, 0.9)
        return loras.bypassed(model, second, -0.6)  # in ComfyUI the second one takes the place of the first

    unchanged = ksampler(case.patch(native), latent, **options)
    reference = ksampler(changed(native), latent, **options)
    assert relative_error(unchanged, reference) > 100 * CLOSE
    for layout, sample in zip(LAYOUTS[:4], (ksampler, parallel_sampler) * 2, strict=True):
        remote = load_case(name, ParallelLayout.parse(layout))
        error = relative_error(sample(changed(remote), latent, **options), reference)
        assert error < CLOSE, f"{layout}: {error:.1e}"
        assert relative_error(sample(case.patch(remote), latent, **options), unchanged) < CLOSE


@pytest.mark.skipif(not loras.HAS_BYPASS, reason="not in this version of ComfyUI")
def test_a_bypassed_dora_is_refused(load: Callable[..., Loaded], native: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"DoRA scale for diffusion_model\..*LoraLoaderBypass ignores: use LoraL"):
        loras.bypassed(load().model, loras.other(native, "dora", seed=1), 1.0)
