"""MiniMax-H3 beyond all families: versions of ComfyUI without it, files, given rows, masks and both shifts."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.model_detection
import comfy.sd
import comfy.supported_models
import pytest
import torch
from any_folder_name.nodes.families.registry import bridge_for
from any_folder_name.parallel_backend.checkpoint.opening import open_checkpoint
from any_folder_name.parallel_backend.errors import InvalidRequest
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from helpers.inside_fixtures import Loaded, ksampler, native_case, parallel_sampler, relative_error
from natives import CASES, minimax_h3
from safetensors.torch import save_file

CLOSE, FAR = 1e-4, 1e-2
SAMPLERS = (ksampler, parallel_sampler)
NAME = "minimax_h3 t2v"
with_class = pytest.mark.skipif(NAME not in CASES, reason="this version of ComfyUI has no MiniMax-H3")


def options_of(kind: str, **changes: Any) -> dict[str, Any]:
    case = CASES[f"minimax_h3 {kind}"]
    return {"positive": case.conditioning(1), "negative": case.conditioning(2, shorter=3), "cfg": case.cfg, **changes}


def test_a_comfyui_without_the_class_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(comfy.supported_models, "MiniMaxH3", raising=False)
    minimax_h3.CASES["t2v"].describe(tmp_path, minimax_h3.CONFIG)
    with pytest.raises(
        InvalidRequest, match=r"this version of ComfyUI has no MiniMax-H3; ComfyUI 0.33.0 and newer have it"
    ):
        bridge_for(open_checkpoint(tmp_path))


@with_class
def test_settings_of_the_metadata_reach_comfyuis_class(tmp_path: Path) -> None:
    weights = native_case(NAME).model.diffusion_model.state_dict()
    given = {"sigma_shift_audio": 5.0, "norm_eps": 1e-6, "final_norm_eps": 1e-4}
    metadata = {"config": json.dumps({"transformer": given})}
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, tmp_path / "file.safetensors", metadata)
    detected = comfy.model_detection.detect_unet_config(weights, "", metadata=metadata)
    assert bridge_for(open_checkpoint(tmp_path / "file.safetensors")).unet_config() == detected
    assert given.items() <= detected.items()


@with_class
@pytest.mark.parametrize("kind", ["keyframes", "references", "tags"])
def test_what_a_prompt_gives_has_an_effect(kind: str) -> None:
    """So that the tests of all families, which compare ours with it, would see that something is lost."""
    model, case = native_case(f"minimax_h3 {kind}"), CASES[f"minimax_h3 {kind}"]
    ((text, extra),) = case.conditioning(1)
    given = ksampler(model, case.samples(), **options_of(kind))
    for name in extra:
        fewer = {key: value for key, value in extra.items() if key != name}
        plain = ksampler(model, case.samples(), **options_of(kind, positive=[[text, fewer]]))
        for one, other in zip(plain.unbind(), given.unbind(), strict=True):
            assert relative_error(one, other) > 10 * CLOSE, name


@with_class
def test_prompts_may_have_unlike_rows(load_case: Callable[..., Any]) -> None:
    case = CASES[NAME]
    positive, negative = (CASES[f"minimax_h3 {kind}"].conditioning(1) for kind in ("references", "keyframes"))
    options = {"positive": positive, "negative": negative, "cfg": 3.0}
    wanted = ksampler(native_case(NAME), case.samples(), **options)
    for sample, layout in zip(SAMPLERS, ("ulysses=2", "cfg=2"), strict=True):
        ours = sample(load_case(NAME, ParallelLayout.parse(layout)), case.samples(), **options)
        assert relative_error(ours, wanted) < CLOSE, layout


@with_class
@pytest.mark.parametrize("masked", ["both", "picture", "sound"])
def test_masks_equal_comfyuis(masked: str, load_case: Callable[..., Any]) -> None:
    case = CASES["minimax_h3 masked"]
    latent = case.samples()
    video, sound = latent["noise_mask"].unbind()
    kept = {"picture": (video, torch.ones_like(sound)), "sound": (torch.ones_like(video), sound)}
    if masked in kept:
        latent["noise_mask"] = minimax_h3.nested(*kept[masked])
    wanted = ksampler(native_case(NAME), latent, **options_of("masked"))
    without = {name: value for name, value in latent.items() if name != "noise_mask"}
    assert relative_error(ksampler(native_case(NAME), without, **options_of("masked")), wanted) > FAR
    for sample, layout in zip(SAMPLERS, ("ring=2", "ulysses=2"), strict=True):
        ours = sample(load_case(NAME, ParallelLayout.parse(layout)), latent, **options_of("masked"))
        assert relative_error(ours, wanted) < CLOSE, layout


@with_class
def test_both_shifts_equal_comfyuis(load_case: Callable[..., Any]) -> None:
    from comfy_extras.nodes_minimax_h3 import MiniMaxH3SigmaShift

    def shifted(model: Any, video: float, sound: float) -> Any:
        return MiniMaxH3SigmaShift.execute(model, video, sound).args[0]

    case, options = CASES[NAME], options_of("t2v")
    found = []
    for video, sound in ((12.0, 3.0), (7.0, 3.0), (12.0, 5.0), (4.0, 4.0)):
        found.append(ksampler(shifted(native_case(NAME), video, sound), case.samples(), **options))
        for sample in SAMPLERS:
            model = shifted(load_case(NAME, ParallelLayout(ulysses=2)), video, sound)
            assert relative_error(sample(model, case.samples(), **options), found[-1]) < CLOSE, (video, sound)
    assert relative_error(ksampler(native_case(NAME), case.samples(), **options), found[0]) < CLOSE
    assert all(relative_error(other, found[0]) > FAR for other in found[1:])


@with_class
@pytest.mark.parametrize("kind", ["t2v", "pruned"])
def test_files_equal_comfyui_through_its_own_loader(
    kind: str, folder: Path, load_remote: Callable[..., Loaded]
) -> None:
    file, case = folder / f"h3 {kind}.safetensors", CASES[f"minimax_h3 {kind}"]
    weights = native_case(f"minimax_h3 {kind}").model.diffusion_model.state_dict()
    save_file({name: tensor.clone().contiguous() for name, tensor in weights.items()}, file)
    native = comfy.sd.load_diffusion_model(str(file))
    wanted = ksampler(native, case.samples(), **options_of(kind))
    for sample, layout in zip(SAMPLERS, ("tensor=2", "ulysses=2 shard_weights"), strict=True):
        model = load_remote(ParallelLayout.parse(layout), name=f"diffusion_models/{file.name}").model
        assert relative_error(sample(model, case.samples(), **options_of(kind)), wanted) < CLOSE, layout


@with_class
def test_a_file_with_sparse_attention_runs_without_it_and_says_so(
    folder: Path, load_remote: Callable[..., Loaded], caplog: pytest.LogCaptureFixture
) -> None:
    """As FastH3's."""
    file, case = folder / "fast h3.safetensors", CASES[NAME]
    weights = native_case(NAME).model.diffusion_model.state_dict()
    gates = {f"blocks.{i}.attn.to_gate_compress.weight": torch.randn(192, 128) for i in range(2)}
    save_file({name: tensor.clone().contiguous() for name, tensor in (weights | gates).items()}, file)
    model = load_remote(ParallelLayout(ulysses=2), name=f"diffusion_models/{file.name}").model
    assert "fast h3.safetensors has weights for sparse attention, which the ranks do not compute" in caplog.text
    wanted = ksampler(native_case(NAME), case.samples(), **options_of("t2v"))
    assert relative_error(ksampler(model, case.samples(), **options_of("t2v")), wanted) < CLOSE


def _broken(kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a latent and what a prompt says beside its text, which do not fit."""
    case = CASES[NAME]
    latent = case.samples()
    if kind == "two":
        video, sound = (each.repeat(2, *[1] * (each.ndim - 1)) for each in latent["samples"].unbind())
        return {"samples": minimax_h3.nested(video, sound)}, {}
    if kind == "tags":
        return latent, {"minimax_token_tags": torch.ones(10, dtype=torch.int64)}
    frames = [{"resolved_frame_index": 0, "latent": torch.zeros(1, 24, 1, 8, 8)}]
    return latent, {"minimax_keyframes": frames}


@with_class
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("two", r"the latent holds 2 videos, and MiniMax-H3 makes one at a time"),
        ("tags", r"has 11 tokens of text and says of 10 what they are: encode the prompt anew"),
        ("size", r"have 16 video rows, and 12 would fit their sizes: encode them at the size of the video"),
    ],
)
def test_what_does_not_fit_is_refused(kind: str, message: str, load_case: Callable[..., Any]) -> None:
    latent, extra = _broken(kind)
    ((text, _),) = CASES[NAME].conditioning(1)
    for sample in SAMPLERS:
        with pytest.raises(InvalidRequest, match=message):
            sample(load_case(NAME, ParallelLayout()), latent, positive=[[text, extra]], negative=[[text, {}]])


@with_class
def test_loras_in_the_published_names_change_what_only_pruned_files_have(load_case: Callable[..., Any]) -> None:
    name, random = "minimax_h3 pruned", torch.Generator().manual_seed(5)
    lora = {
        f"diffusion_model.{layer}.{end}": torch.randn(*shape, generator=random) * 0.1
        for layer, rows, columns in (
            ("blocks.1.adaln_proj.linear", 18 * 128, 48), ("final_layer.adaln_proj.linear", 256, 48),
            ("token_refiner.blocks.0.mlp.fc1", 384, 128), ("condition_proj", 128, 80), ("video_patch_proj", 128, 96),
        )
        for end, shape in (("lora_B.weight", (rows, 4)), ("lora_A.weight", (4, columns)))
    }  # fmt: skip

    def changed(model: Any, strength: float) -> Any:
        return comfy.sd.load_lora_for_models(model, None, lora, strength, 0)[0]

    case, options = CASES[name], options_of("pruned")
    native = case.native()
    plain, wanted = (ksampler(changed(native, strength), case.samples(), **options) for strength in (0.0, 0.8))
    assert relative_error(plain, wanted) > FAR
    for layout in ("ulysses=2", "tensor=2"):
        model = load_case(name, ParallelLayout.parse(layout))
        for strength, expected in ((0.8, wanted), (0.0, plain)):
            assert relative_error(ksampler(changed(model, strength), case.samples(), **options), expected) < CLOSE
