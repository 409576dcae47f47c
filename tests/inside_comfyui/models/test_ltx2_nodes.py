"""What ComfyUI's nodes for LTX-2 add to prompts, latents and models: a parallel MODEL against ComfyUI's own."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.samplers
import folder_paths
import pytest
import torch
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from comfy_extras import nodes_lt
from helpers import compressed_files, loras
from helpers import ltx2_nodes as made
from helpers.inside_fixtures import Loaded, ksampler, native_case, parallel_sampler, relative_error
from natives import CASES
from natives.case import seeded
from natives.files import metadata

CLOSE = 1e-4
NAME = "ltx2 2.3"
pytestmark = pytest.mark.skipif(NAME not in CASES, reason="this version of ComfyUI has no LTX-2.3")
LAYOUTS = ("ulysses=2", "ring=3", "tensor=2", "pipe=2 patches=1", "ulysses=3", "cfg=2")
HALF = torch.zeros(9, 128, 192)
HALF[:, :, 64:] = 0.7
GUIDES: dict[str, list[dict[str, Any]]] = {
    "first and last frame": [{"strength": 1.0}, {"strength": 0.6, "frame_idx": -1}],
    "more than whole": [{"strength": 1.8, "frame_idx": 8}],
    "none of a guide": [{"strength": 0.0}, {"strength": 0.5, "frame_idx": 16}],
    "a video with a mask": [{"strength": 0.8, "image": torch.rand(9, 128, 192, 3), "attention_mask": HALF}],
    "of half the size": [
        {"strength": 1.0, "image": torch.rand(9, 128, 192, 3), "iclora_parameters": {"reference_downscale_factor": 2}}
    ],
    "of half the size and weak": [
        {"strength": 0.5, "image": torch.rand(9, 128, 192, 3), "iclora_parameters": {"reference_downscale_factor": 2}},
        {"strength": 0.7, "frame_idx": -1},
    ],
}


def layouts_of(place: int) -> list[ParallelLayout]:
    """Return two layouts, so that all cases together meet every one with both samplers."""
    return [ParallelLayout.parse(LAYOUTS[(place + i) % len(LAYOUTS)]) for i in (0, 1)]


def load(load_case: Callable[..., Any], layout: ParallelLayout) -> Any:
    return load_case(NAME, layout, devices=",".join(map(str, range(layout.ranks))))


@pytest.mark.parametrize("kind", GUIDES)
@pytest.mark.daily(1)
def test_guides_equal_comfyui(kind: str, load_case: Callable[..., Any]) -> None:
    given = made.guided(GUIDES[kind], NAME)
    latent = given.pop("latent")
    reference = ksampler(native_case(NAME), latent, **given)
    entries = given["positive"][0][1]["guide_attention_entries"]
    whole = [{**entry, "strength": 1.0, "pixel_mask": None} for entry in entries]
    full = {key: [[text, {**extra, "guide_attention_entries": whole}] for text, extra in each]
            for key, each in given.items()}  # fmt: skip
    if any(entry["strength"] != 1.0 for entry in entries):
        assert relative_error(ksampler(native_case(NAME), latent, **full), reference) > 10 * CLOSE
    place = list(GUIDES).index(kind)
    for sample, layout in zip((ksampler, parallel_sampler), layouts_of(place), strict=True):
        error = relative_error(sample(load(load_case, layout), latent, **given), reference)
        assert error < CLOSE, f"{sample.__name__}, {layout}: {error:.1e}"


def test_the_mask_of_a_guide_counts() -> None:
    given = made.guided(GUIDES["a video with a mask"], NAME)
    latent = given.pop("latent")
    plain = made.guided([{**GUIDES["a video with a mask"][0], "attention_mask": None}], NAME)
    plain.pop("latent")
    results = [ksampler(native_case(NAME), latent, **each) for each in (given, plain)]
    assert relative_error(*results) > 10 * CLOSE


def test_guides_of_another_size_are_refused(load_case: Callable[..., Any]) -> None:
    given = made.guided(GUIDES["more than whole"], NAME)
    del given["latent"]
    latent = made.with_sound(made.empty((5, 8, 12)))
    for sample in (ksampler, parallel_sampler):
        with pytest.raises(Exception, match="crop them with LTXVCropGuides before the latent is upscaled"):
            sample(load(load_case, ParallelLayout()), latent, **given)


GUIDANCE = {
    "spatio-temporal": ("LTXVSpatioTemporalGuidance", {"scale": 1.5, "blocks": "1", "start_percent": 0.0,
                                                       "end_percent": 1.0}),
    "of both streams": ("LTXVModalityGuidance", {"modality_scale": 3.0, "start_percent": 0.0, "end_percent": 1.0}),
}  # fmt: skip


@pytest.mark.parametrize("kind", GUIDANCE)
@pytest.mark.daily(1)
def test_guidance_by_a_further_pass_equals_comfyui(kind: str, load_case: Callable[..., Any]) -> None:
    node, inputs = GUIDANCE[kind]
    if not hasattr(nodes_lt, node):
        pytest.skip("not in this version of ComfyUI")
    positive, negative = made.prompts(NAME)
    latent = made.with_sound(made.empty())
    options = {"positive": positive, "negative": negative}

    def patched(model: Any) -> Any:
        return getattr(nodes_lt, node).execute(model, **inputs).args[0]

    reference = ksampler(patched(native_case(NAME)), latent, **options)
    assert relative_error(ksampler(native_case(NAME), latent, **options), reference) > 100 * CLOSE
    place = list(GUIDANCE).index(kind)
    for i, layout in enumerate(("ulysses=2", "ring=3", "tensor=2", "pipe=2 patches=1")):
        sample = (ksampler, parallel_sampler)[(i + place) % 2]
        model = patched(load(load_case, ParallelLayout.parse(layout)))
        error = relative_error(sample(model, latent, **options), reference)
        assert error < CLOSE, f"{sample.__name__}, {layout}: {error:.1e}"


@pytest.mark.skipif(not hasattr(nodes_lt, "LTXVSpatioTemporalGuidance"), reason="not in this version of ComfyUI")
def test_self_attention_that_is_skipped_in_all_layers_equals_comfyui(load_case: Callable[..., Any]) -> None:
    """By the option that ComfyUI sets for single layers."""
    positive, negative = made.prompts(NAME)
    latent, options = made.with_sound(made.empty()), {"positive": positive, "negative": negative}

    def skipping(model: Any) -> Any:
        changed = model.clone()
        changed.model_options["transformer_options"]["stg_skip_self_attn"] = True
        return changed

    reference = ksampler(skipping(native_case(NAME)), latent, **options)
    assert relative_error(ksampler(native_case(NAME), latent, **options), reference) > 100 * CLOSE
    for sample in (ksampler, parallel_sampler):
        model = skipping(load(load_case, ParallelLayout.parse("ulysses=2")))
        assert relative_error(sample(model, latent, **options), reference) < CLOSE


@pytest.mark.skipif(not hasattr(nodes_lt, "LTXVReferenceAudio"), reason="not in this version of ComfyUI")
@pytest.mark.parametrize("scale", [0.0, 3.0])
@pytest.mark.daily(1)
def test_a_voice_to_imitate_equals_comfyui(scale: float, load_case: Callable[..., Any]) -> None:
    latent, prompts = made.with_sound(made.empty()), made.prompts(NAME)
    audio = {"waveform": torch.zeros(1, 2, 16000), "sample_rate": 16000}

    def patched(model: Any) -> tuple[Any, dict[str, Any]]:
        vae = made.sound_encoder(seeded(4), 9)
        model, positive, negative = nodes_lt.LTXVReferenceAudio.execute(
            model, *prompts, audio, vae, scale, 0.0, 0.9
        ).args
        return model, {"positive": positive, "negative": negative}

    model, options = patched(native_case(NAME))
    reference = ksampler(model, latent, **options)
    unheard = ksampler(native_case(NAME), latent, positive=prompts[0], negative=prompts[1])
    assert relative_error(unheard, reference) > 100 * CLOSE
    for sample, layout in zip((ksampler, parallel_sampler), ("ulysses=3", "tensor=2"), strict=True):
        model, options = patched(load(load_case, ParallelLayout.parse(layout)))
        error = relative_error(sample(model, latent, **options), reference)
        assert error < CLOSE, f"{sample.__name__}, {layout}: {error:.1e}"


def _with_guide(model: Any) -> tuple[Any, dict[str, Any]]:
    """Return the model, and prompts and latent of a video of half the size, to which an IC-LoRA's weights look."""
    return model, made.guided(GUIDES["of half the size"], NAME)


def _with_voice(model: Any) -> tuple[Any, dict[str, Any]]:
    """Return a model that hears a voice, as for an ID-LoRA, and prompts and latent."""
    audio = {"waveform": torch.zeros(1, 2, 16000), "sample_rate": 16000}
    vae = made.sound_encoder(seeded(4), 9)
    model, positive, negative = nodes_lt.LTXVReferenceAudio.execute(
        model, *made.prompts(NAME), audio, vae, 3.0, 0.0, 0.9
    ).args
    return model, {"positive": positive, "negative": negative, "latent": made.with_sound(made.empty())}


@pytest.mark.skipif(not hasattr(nodes_lt, "LTXVReferenceAudio"), reason="not in this version of ComfyUI")
@pytest.mark.parametrize(
    ("given", "format", "layout"), [(_with_guide, "fp8 e4m3", "ring=3"), (_with_voice, "int8 rotated", "tensor=2")]
)
@pytest.mark.daily(1)
def test_loras_that_look_at_a_reference_equal_comfyui_on_a_compressed_file(
    given: Callable[[Any], Any], format: str, layout: str, tmp_path: Path, load_remote: Callable[..., Loaded]
) -> None:
    """An IC-LoRA with its video, and an ID-LoRA with its voice, against the decoded weights in ComfyUI."""
    folder_paths.folder_names_and_paths["diffusion_models"][0][:] = [str(tmp_path)]
    case, file = CASES[NAME], tmp_path / "compressed.safetensors"
    native = case.native()
    weights = {key: tensor.clone() for key, tensor in native.model.diffusion_model.state_dict().items()}
    decoded = compressed_files.write_described(file, weights, format, said=metadata(case))
    native.model.diffusion_model.load_state_dict(decoded)
    of_blocks = {
        key: each
        for key, each in loras.plain(native, "diffusion_model.", rank=4, seed=3).items()
        if "transformer_blocks" in key
    }
    split = ParallelLayout.parse(layout)
    devices = ",".join(map(str, range(split.ranks)))
    model = load_remote(split, name=f"diffusion_models/{file.name}", devices=devices).model
    results = []
    for each, strength in ((native, 0.0), (native, 0.6), (model, 0.6), (model, -0.3), (native, -0.3)):
        changed, options = given(loras.on_model(each, (of_blocks, strength)))
        results.append(ksampler(changed, options.pop("latent"), **options))
    assert relative_error(results[0], results[1]) > 100 * CLOSE
    assert relative_error(results[2], results[1]) < CLOSE
    assert relative_error(results[3], results[4]) < CLOSE


def guiders(positive: Any, negative: Any) -> dict[str, Callable[[Any], Any]]:
    """Return what makes each guider of a model."""

    def basic(model: Any) -> Any:
        guider = comfy.samplers.CFGGuider(model)
        guider.inner_set_conds({"positive": positive})
        return guider

    def cfg(model: Any) -> Any:
        guider = comfy.samplers.CFGGuider(model)
        guider.set_conds(positive, negative)
        guider.set_cfg(3.0)
        return guider

    found = {"basic": basic, "cfg": cfg}
    if hasattr(nodes_lt, "LTXVDualCFGGuider"):
        found["two scales"] = lambda model: nodes_lt.LTXVDualCFGGuider.execute(
            model, positive, negative, 3.0, 7.0
        ).args[0]
    return found


@pytest.mark.parametrize("kind", ["basic", "cfg", "two scales"])
@pytest.mark.daily(1)
def test_guiders_equal_comfyui(kind: str, load_case: Callable[..., Any]) -> None:
    make = guiders(*made.prompts(NAME)).get(kind)
    if make is None:
        pytest.skip("not in this version of ComfyUI")
    latent, native = made.with_sound(made.empty()), native_case(NAME)
    reference = made.custom(native, make(native), latent)["samples"]
    for layout in ("ulysses=3", "pipe=2 patches=1" if kind == "basic" else "cfg=2", "ulysses=2 shard_weights"):
        model = load(load_case, ParallelLayout.parse(layout))
        error = relative_error(made.custom(model, make(model), latent)["samples"], reference)
        assert error < CLOSE, f"{layout}: {error:.1e}"


def test_a_sound_that_is_kept_equals_comfyui(load_case: Callable[..., Any]) -> None:
    """As templates for a picture to a given sound have it: a mask of 0 for the sound alone."""
    positive, negative = made.prompts(NAME)
    latent = made.with_sound(made.empty(), mask=torch.zeros(1, 1, 26, 16))
    options = {"positive": positive, "negative": negative}
    reference = ksampler(native_case(NAME), latent, **options)
    sound = reference.unbind()[1]
    assert relative_error(sound, latent["samples"].unbind()[1]) < CLOSE
    for sample, layout in zip((ksampler, parallel_sampler), ("ring=2", "ulysses=3"), strict=True):
        model = load(load_case, ParallelLayout.parse(layout))
        assert relative_error(sample(model, latent, **options), reference) < CLOSE


def upsampled(latent: Any, model: Any) -> Any:
    """Run ComfyUI's latent upsampler between the stages."""
    from comfy_extras.nodes_lt_upsampler import LTXVLatentUpsampler

    statistics = type("Statistics", (), {"un_normalize": lambda self, x: x * 1.3, "normalize": lambda self, x: x / 1.3})
    vae = type("Vae", (), {"first_stage_model": type("Stage", (), {"per_channel_statistics": statistics()})()})()
    return LTXVLatentUpsampler.execute(latent, model, vae).args[0]


@pytest.fixture(scope="module")
def upsampler() -> Any:
    import comfy.model_patcher
    import comfy.ops
    from comfy.ldm.lightricks.latent_upsampler import LatentUpsampler

    torch.manual_seed(3)
    taken = inspect.signature(LatentUpsampler).parameters  # newer versions of ComfyUI choose the layers' kind
    kind = [comfy.ops.manual_cast] if "operations" in taken else []
    module = LatentUpsampler(*kind, mid_channels=64, num_blocks_per_stage=1).eval()
    module = module.requires_grad_(False)
    for parameter in module.parameters():
        std = parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.1
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=std)
    cpu = torch.device("cpu")
    return comfy.model_patcher.ModelPatcher(module, load_device=cpu, offload_device=cpu)


def test_two_stages_equal_comfyui(load_case: Callable[..., Any], upsampler: Any) -> None:
    """Sampling, the latent upsampler, the first frame again, and three steps more, as the templates have it."""
    positive, negative = made.prompts(NAME)

    def both(model: Any) -> Any:
        make = guiders(positive, negative)
        first = made.custom(model, make["cfg"](model), made.with_sound(made.empty((4, 3, 5))))
        picture, sound = nodes_lt.LTXVSeparateAVLatent.execute(first).args
        larger = upsampled(picture, upsampler)
        image = torch.rand(1, 192, 320, 3, generator=torch.Generator().manual_seed(6))
        larger = nodes_lt.LTXVImgToVideoInplace.execute(made.Encoder(seeded(7)), image, larger, 1.0).args[0]
        latent = nodes_lt.LTXVConcatAVLatent.execute(larger, sound).args[0]
        sigmas = torch.tensor([0.909375, 0.725, 0.421875, 0.0])
        return made.custom(model, make["basic"](model), latent, sigmas, seed=8)["samples"]

    reference = both(native_case(NAME))
    assert reference.unbind()[0].shape[-2:] == (6, 10)
    for layout in ("ulysses=2", "ring=3"):
        error = relative_error(both(load(load_case, ParallelLayout.parse(layout))), reference)
        assert error < CLOSE, f"{layout}: {error:.1e}"


def test_stages_alone_take_one_patch_and_are_exact(load_case: Callable[..., Any]) -> None:
    """With a sampler that only ComfyUI's loop has, which an approximate layout cannot use."""
    positive, negative = made.prompts(NAME)
    latent = made.with_sound(made.empty())
    options = {"positive": positive, "negative": negative, "sampler_name": "ddim"}
    model = load(load_case, ParallelLayout.parse("pipe=2"))
    assert not model.model.diffusion_model.handle.spec.layout.approximate
    reference = ksampler(native_case(NAME), latent, **options)
    assert relative_error(parallel_sampler(model, latent, **options), reference) < CLOSE
    with pytest.raises(Exception, match="use patches=1"):
        parallel_sampler(
            load(load_case, ParallelLayout.parse("pipe=2 patches=4")), latent, **options | {"sampler_name": "euler"}
        )
