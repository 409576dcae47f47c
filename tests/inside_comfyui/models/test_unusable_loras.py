"""LoRA files that fit a parallel MODEL in part or not at all, and broken ones."""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.hooks
import comfy.lora
import comfy.sd
import folder_paths
import node_helpers
import pytest
import torch
from any_folder_name.nodes.remote import changing_patcher
from any_folder_name.nodes.remote.digests import described
from any_folder_name.nodes.remote.weight_fit import said_by_comfyui
from any_folder_name.nodes.remote.weight_patches import _row_order
from any_folder_name.parallel_backend.errors import InvalidRequest
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from helpers import loras
from helpers.inside_fixtures import Loaded, ksampler, relative_error
from natives import CASES
from safetensors.torch import save_file
from torch import Tensor

LAYER = "diffusion_model.blocks.0.self_attn.q"
FITS = {"lora_up.weight": torch.ones(48, 2), "lora_down.weight": torch.ones(2, 48)}
"""Factors for the layer."""


def factors(up: tuple[int, ...], down: tuple[int, ...], **others: Tensor) -> dict[str, Tensor]:
    return {"lora_up.weight": torch.ones(up), "lora_down.weight": torch.ones(down)} | {
        name.replace("_weight", ".weight") if name == "lora_mid_weight" else name: each for name, each in others.items()
    }


OTHER = "it is for another model"
UNUSABLE: dict[str, tuple[dict[str, Tensor], str]] = {
    "rank 0": (factors((48, 0), (0, 48)), r"the LoRA: .*q.weight have rank 0 \(\[48, 0\] and \[0, 48\]\): download"),
    "ranks differ": (
        factors((48, 3), (2, 48)),
        rf"the LoRA fits no weight of tiny: .*q.weight have shapes \[48, 3\] and \[2, 48\], .* \[48, 48\]: {OTHER}",
    ),
    "columns": (factors((48, 2), (2, 40)), rf"fits no weight of tiny: .* and \[2, 40\], and the weight .*: {OTHER}"),
    "a number": (factors((), (2, 48)), rf"fits no weight of tiny: .* shapes \[\] and \[2, 48\], .*: {OTHER}"),
    "NaN alpha": (factors((48, 2), (2, 48), alpha=torch.tensor(math.nan)), r"LoRA: .*q.weight has a number that is no"),
    "infinity": ({**FITS, "lora_up.weight": torch.full((48, 2), math.inf)}, "has a number that is not finite: downl"),
    "NaN in a diff": ({"diff": torch.full((48, 48), math.nan)}, "has a number that is not finite: download"),
    "middle": (factors((48, 2), (2, 48), lora_mid_weight=torch.ones(2, 2)), r"lora_mid for .* has shape \[2, 2\]"),
    "smaller": (factors((48, 2), (2, 48), reshape_weight=torch.tensor([40, 48])), r"reshape_weight .* is \[40, 48\]"),
    "larger": (factors((48, 2), (2, 48), reshape_weight=torch.tensor([48, 60])), r"enlarges .* to \[48, 60\]"),
    "diff": ({"diff": torch.ones(3, 3)}, rf"fits no weight of tiny: the diff for .* has shape \[3, 3\], .*: {OTHER}"),
    "set": ({"set_weight": torch.ones(3, 48)}, r"the set for .* has shape \[3, 48\].*: the file is for another model"),
    "lokr": ({"lokr_w1": torch.ones(2, 2), "lokr_w2": torch.ones(5, 5)}, rf"no weight of tiny: .*: {OTHER}"),
    "dora": (factors((48, 2), (2, 48), dora_scale=torch.ones(7, 1)), rf"no weight of tiny: .*: {OTHER}"),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_a_file_that_cannot_be_used_is_refused_before_anything_moves(kind: str, load: Callable[..., Loaded]) -> None:
    loaded = load()
    tensors, message = UNUSABLE[kind]
    lora = {f"{LAYER}.{end}": tensor for end, tensor in tensors.items()}
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)  # as with --verbose ERROR
    try:
        with pytest.raises(InvalidRequest, match=message):
            loras.on_model(loaded.model, (lora, 1.0))
    finally:
        root.setLevel(level)
    assert not loaded.client.work


@pytest.mark.parametrize("start", ["base_model.model.", "another."])
def test_a_lora_whose_names_comfyui_does_not_know_is_refused_with_the_first(
    start: str, load: Callable[..., Loaded], native: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lora = {f"{start}blocks.0.self_attn.q.{end}": tensor for end, tensor in FITS.items()}
    assert comfy.lora.load_lora(lora, comfy.lora.model_lora_keys_unet(native.model, {})) == {}
    unknown = "file.safetensors fits no weight of tiny: ComfyUI knows none of its names for this model"
    with pytest.raises(InvalidRequest, match=f"^{unknown.replace('file.safetensors', 'the LoRA')}, and would ignore"):
        loras.on_model(load().model, (lora, 1.0))
    save_file(lora, tmp_path / "file.safetensors")
    monkeypatch.setitem(folder_paths.folder_names_and_paths, "loras", ([str(tmp_path)], {".safetensors"}))
    monkeypatch.setattr(changing_patcher, "executing_lora", lambda: "file.safetensors")
    with pytest.raises(InvalidRequest, match=rf"^{unknown}, such as {start}blocks\.0\.self_attn\.q\.lora_"):
        loras.on_model(load().model, (lora, 1.0))


def test_a_strength_that_is_not_finite_is_refused(load: Callable[..., Loaded]) -> None:
    with pytest.raises(InvalidRequest, match="the strength of the LoRA is nan: a finite number is needed"):
        loras.on_model(load().model, ({f"{LAYER}.{end}": tensor for end, tensor in FITS.items()}, math.nan))


def test_what_does_not_fit_is_left_out_as_comfyui_does(
    load_case: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    case = CASES["wan t2v"]
    native = case.native()
    lora = loras.plain(native, "diffusion_model.", rank=2, seed=1)
    layers = list(loras.targets(native)["diffusion_model."])
    down = next(name for name in lora if name.startswith(f"{layers[0]}.") and ("down" in name or "lora_A" in name))
    lora[down] = torch.cat([lora[down], lora[down]], dim=1)
    lora[f"{layers[1]}.diff"] = torch.ones(3, 3)
    reference = ksampler(loras.on_model(native, (lora, 1.0)), case.samples(), **loras.options_of(case))
    remote = loras.on_model(load_case("wan t2v", ParallelLayout.parse("ulysses=2")), (lora, 1.0))
    assert relative_error(ksampler(remote, case.samples(), **loras.options_of(case)), reference) < 1e-4
    (said,) = [each.getMessage() for each in caplog.records if "does not fit" in each.getMessage()]
    assert f"the LoRA does not fit {layers[0]}.weight, {layers[1]}.weight, which stay as they are: the factors" in said


def test_integer_factors_are_cast_as_in_comfyui(load_case: Callable[..., Any]) -> None:
    case = CASES["wan t2v"]
    native = case.native()
    name = LAYER
    rows, columns = native.model.state_dict()[f"{name}.weight"].shape
    ends = {"lora_up.weight": torch.ones(rows, 1), "lora_down.weight": torch.ones(1, columns)}
    lora = {f"{name}.{end}": tensor.int() for end, tensor in ends.items()}
    reference = ksampler(loras.on_model(native, (lora, 0.1)), case.samples(), **loras.options_of(case))
    remote = loras.on_model(load_case("wan t2v", ParallelLayout()), (lora, 0.1))
    assert relative_error(ksampler(remote, case.samples(), **loras.options_of(case)), reference) < 1e-4


UNPATCHED = {"wan t2v": ("blocks.0.modulation", "head.modulation"), "sd3 medium": ("pos_embed",)}


@pytest.mark.parametrize("name", UNPATCHED)
def test_weights_that_comfyui_does_not_patch_are_left_alone(
    name: str, load_case: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    case = CASES[name]
    native, latent, options = case.native(), case.samples(), loras.options_of(case)
    weights = native.model.state_dict()
    names = [f"diffusion_model.{each}" for each in UNPATCHED[name]]
    random = torch.Generator().manual_seed(1)
    patches = {each: ("diff", (torch.randn(weights[each].shape, generator=random),)) for each in names}
    model = case.patch(native.clone())
    model.add_patches(dict(patches), 0.5)
    hooks = comfy.hooks.HookGroup()
    hooks.add(comfy.hooks.WeightHook(strength_model=0.5))
    hooks.hooks[0].weights, hooks.hooks[0].need_weight_init = dict(patches), False
    hooked = options | {"positive": node_helpers.conditioning_set_values(options["positive"], {"hooks": hooks})}
    remote = case.patch(load_case(name, ParallelLayout.parse("ulysses=2")).clone())
    remote.add_patches(dict(patches), 0.5)
    for given in (options, hooked):
        assert relative_error(ksampler(remote, latent, **given), ksampler(model, latent, **given)) < 1e-4
    assert relative_error(ksampler(model, latent, **hooked), ksampler(model, latent, **options)) > 1e-2
    (said,) = [each.getMessage() for each in caplog.records if "leaves as they are" in each.getMessage()]
    assert f"the LoRA changes {', '.join(names)}, which ComfyUI" in said


def test_a_hook_for_the_text_encoder_alone_is_as_good_as_none(load_case: Callable[..., Any]) -> None:
    remote, case = load_case("sd3 medium", ParallelLayout()), CASES["sd3 medium"]
    latent, options = case.samples(), loras.options_of(case)
    text = {"lora_te1_text_model_encoder_layers_0_mlp_fc1.lora_up.weight": torch.ones(2, 2)}
    plain = ksampler(remote, latent, **options)
    for lora, strength in ((text, 1.0), ({"another.layer.lora_up.weight": torch.ones(2, 2)}, 0.0)):
        hooks = comfy.hooks.create_hook_lora(lora, strength, 1.0)
        hooked = options | {"positive": node_helpers.conditioning_set_values(options["positive"], {"hooks": hooks})}
        assert torch.equal(ksampler(remote, latent, **hooked), plain)
    hooks = comfy.hooks.create_hook_lora({"another.layer.lora_up.weight": torch.ones(2, 2)}, 1.0, 1.0)
    hooked = options | {"positive": node_helpers.conditioning_set_values(options["positive"], {"hooks": hooks})}
    with pytest.raises(InvalidRequest, match=r"fits no weight of sd3 medium: .* such as another\.layer\."):
        ksampler(remote, latent, **hooked)


def test_functions_that_do_more_than_to_order_rows_are_noticed() -> None:
    def scaled_first(rows: Tensor) -> Tensor:
        return torch.cat([rows[:1] * -5.0, rows[1:]])

    halves = _row_order(lambda rows: torch.cat([rows[3:], rows[:3]]), 6)
    assert halves is not None
    assert halves.tolist() == [3, 4, 5, 0, 1, 2]
    for function in (scaled_first, lambda rows: rows.flip(1), lambda rows: rows * 2, lambda rows: rows[:3]):
        assert _row_order(function, 6) is None


def test_functions_of_one_name_are_told_apart() -> None:
    def scaled_by(factor: float) -> Callable[[Tensor], Tensor]:
        return lambda weight: weight * factor

    once, twice = scaled_by(1.0), scaled_by(2.0)
    assert described(once) == described(once) != described(twice)


def test_warnings_of_other_threads_are_not_taken_for_ours() -> None:
    from threading import Thread

    with said_by_comfyui() as messages:
        other = Thread(target=logging.warning, args=("of another thread",))
        other.start()
        other.join()
        logging.warning("of this one")
    assert messages == ["of this one"]
