"""LTX-2 beyond what all families have: its text connectors, refusals, and the kinds of its LoRAs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import folder_paths
import pytest
import torch
from any_folder_name.nodes.families import ltx2_connectors
from any_folder_name.nodes.families.registry import bridge_for
from any_folder_name.nodes.remote.weight_fit import changed_weight
from any_folder_name.parallel_backend.checkpoint.opening import open_checkpoint
from any_folder_name.parallel_backend.errors import InvalidRequest
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from helpers import compressed_files, loras
from helpers.inside_fixtures import Loaded, ksampler, native_case, parallel_sampler, relative_error
from natives import CASES, ltx2
from natives.files import metadata
from safetensors.torch import save_file

CLOSE = 1e-4
SAMPLERS = (ksampler, parallel_sampler)
CONNECTED = [name for name in ("ltx2 2", "ltx2 2.3", "ltx2 2.5") if name in CASES]
runs_connectors = pytest.mark.skipif(
    not hasattr(ltx2.LTXAVModel, "preprocess_text_embeds"), reason="the text encoder of this version has the connectors"
)


def unprocessed(name: str, seed: int, tokens: int = 11) -> list[Any]:
    """Return a prompt as the text encoder gives it, before the connectors."""
    case = CASES[name]
    width = case.unet["caption_channels"] if name == "ltx2 2" else 384
    text = torch.randn(1, tokens, width, generator=torch.Generator().manual_seed(seed))
    return [[text, {"frame_rate": 30.0, "unprocessed_ltxav_embeds": True}]]


def save(path: Path, name: str, left_out: str = "no such name", **changed: Any) -> None:
    """Save a case's whole checkpoint, with its metadata and parts that stay in ComfyUI."""
    weights = native_case(name).model.diffusion_model.state_dict()
    tensors = {
        f"model.diffusion_model.{key}": tensor.clone().contiguous()
        for key, tensor in weights.items()
        if left_out not in key
    }
    others = {"audio_vae.decoder.conv_in.conv.weight": torch.ones(2, 2), "vocoder.conv_pre.weight": torch.ones(2, 2)}
    others |= {"text_embedding_projection.aggregate_embed.weight": torch.ones(2, 2)}
    save_file(tensors | others, path, {"config": json.dumps({"transformer": {**CASES[name].unet, **changed}})})


@pytest.fixture
def load_whole(tmp_path: Path, load_remote: Callable[..., Loaded]) -> Callable[..., Any]:
    """``load_whole(name, layout)`` returns Parallel Loader's MODEL of a whole checkpoint."""

    def run(name: str, layout: ParallelLayout, **options: Any) -> Any:
        folder_paths.folder_names_and_paths["checkpoints"][0][:] = [str(tmp_path)]
        save(tmp_path / "whole.safetensors", name, **options)
        return load_remote(layout, name="checkpoints/whole.safetensors").model

    return run


@runs_connectors
@pytest.mark.parametrize("name", CONNECTED)
@pytest.mark.daily(1)
def test_prompts_go_through_the_connectors(name: str, load_whole: Callable[..., Any]) -> None:
    case = CASES[name]
    options = {"positive": unprocessed(name, 1), "negative": unprocessed(name, 2, tokens=8), "cfg": case.cfg}
    reference = ksampler(native_case(name), case.samples(), **options)
    other = ksampler(native_case(name), case.samples(), **options | {"positive": unprocessed(name, 3)})
    assert relative_error(other, reference) > 100 * CLOSE
    model = load_whole(name, ParallelLayout(ulysses=2))
    for sample in SAMPLERS:
        assert relative_error(sample(model, case.samples(), **options), reference) < CLOSE


@runs_connectors
def test_a_file_without_connectors_is_refused_when_a_prompt_needs_them(load_whole: Callable[..., Any]) -> None:
    model = load_whole("ltx2 2", ParallelLayout(), left_out="video_embeddings_connector")
    prompt = unprocessed("ltx2 2", 1)
    with pytest.raises(InvalidRequest, match="lacks the text connectors of LTX-2"):
        ksampler(model, CASES["ltx2 2"].samples(), positive=prompt, negative=prompt)


def test_a_file_without_metadata_is_refused(tmp_path: Path) -> None:
    weights = native_case("ltx2 2").model.diffusion_model.state_dict()
    save_file({name: tensor.clone().contiguous() for name, tensor in weights.items()}, tmp_path / "bare.safetensors")
    with pytest.raises(InvalidRequest, match="does not say how LTX-2 places its tokens"):
        bridge_for(open_checkpoint(tmp_path / "bare.safetensors"))


def change(name: str, seed: int) -> dict[str, torch.Tensor]:
    """Return a LoRA that changes every layer of a connector."""
    random = torch.Generator().manual_seed(seed)
    weights = native_case(name).model.diffusion_model.state_dict()
    layers = [key for key, weight in weights.items() if "embeddings_connector" in key and weight.ndim == 2]
    lora: dict[str, torch.Tensor] = {}
    for key in layers:
        layer, (rows, columns) = f"diffusion_model.{key.removesuffix('.weight')}", weights[key].shape
        lora[f"{layer}.lora_A.weight"] = torch.randn(2, columns, generator=random) * columns**-0.5
        lora[f"{layer}.lora_B.weight"] = torch.randn(rows, 2, generator=random)
    return {key: each for key, each in lora.items() if "learnable_registers" not in key}


@runs_connectors
@pytest.mark.parametrize("name", CONNECTED)
@pytest.mark.daily(1)
def test_a_lora_of_connectors_equals_comfyui(name: str, load_whole: Callable[..., Any]) -> None:
    case, latent = CASES[name], CASES[name].samples()
    options = {"positive": unprocessed(name, 1), "negative": unprocessed(name, 2, tokens=8), "cfg": case.cfg}
    native, model = case.native(), load_whole(name, ParallelLayout(ulysses=2))
    plain = ksampler(native, latent, **options)
    for seed, strength in ((1, 0.7), (2, -0.4)):
        changed = [loras.on_model(each, (change(name, seed), strength)) for each in (native, model)]
        reference = ksampler(changed[0], latent, **options)
        assert relative_error(plain, reference) > 100 * CLOSE
        for sample in SAMPLERS:
            assert relative_error(sample(changed[1], latent, **options), reference) < CLOSE
    assert relative_error(ksampler(model, latent, **options), plain) < CLOSE


@runs_connectors
def test_a_change_of_connectors_that_fails_leaves_none_behind(
    load_whole: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, case = "ltx2 2", CASES["ltx2 2"]
    options = {"positive": unprocessed(name, 1), "negative": unprocessed(name, 2), "steps": 1}
    plain = load_whole(name, ParallelLayout())
    changed = [loras.on_model(plain, (change(name, seed), 0.7)) for seed in (1, 2)]
    applied: list[str] = []

    def fails(weight_name: str, *args: Any) -> torch.Tensor:
        applied.append(weight_name)
        if len(applied) > 2:
            raise InvalidRequest("no room")
        return changed_weight(weight_name, *args)

    for model in (plain, changed[0]):
        reference = ksampler(model, case.samples(), **options)
        applied.clear()
        with monkeypatch.context() as patched:
            patched.setattr(ltx2_connectors, "changed_weight", fails)
            with pytest.raises(InvalidRequest, match="no room"):
                ksampler(changed[1], case.samples(), **options)
        assert relative_error(ksampler(model, case.samples(), **options), reference) < CLOSE


@pytest.mark.skipif("ltx2 2.3" not in CASES, reason="this version of ComfyUI has no LTX-2.3")
@pytest.mark.parametrize("suffix", ["safetensors", "gguf"])
@pytest.mark.daily(1)
def test_compressed_connectors_equal_the_decoded_ones(
    suffix: str, tmp_path: Path, load_remote: Callable[..., Loaded]
) -> None:
    name = "ltx2 2.3"
    folder_paths.folder_names_and_paths["diffusion_models"][0][:] = [str(tmp_path)]
    case, file = CASES[name], tmp_path / f"whole.{suffix}"
    native = case.native()
    weights = {key: tensor.clone() for key, tensor in native.model.diffusion_model.state_dict().items()}
    if suffix == "gguf":
        decoded = compressed_files.write_gguf(file, weights, "Q8_0", said=metadata(case))
    else:
        decoded = compressed_files.write_described(file, weights, "fp8 e4m3", said=metadata(case))
    changed = [key for key in decoded if "connector" in key and not torch.equal(decoded[key], weights[key])]
    assert changed
    options = {"positive": unprocessed(name, 1), "negative": unprocessed(name, 2, tokens=8), "cfg": case.cfg}
    native.model.diffusion_model.load_state_dict(decoded)
    model = load_remote(ParallelLayout(tensor=2), name=f"diffusion_models/{file.name}").model
    for lora in ({}, change(name, 1)):
        both = [loras.on_model(each, (lora, 0.7)) if lora else each for each in (native, model)]
        reference = ksampler(both[0], case.samples(), **options)
        assert relative_error(ksampler(both[1], case.samples(), **options), reference) < CLOSE


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("run_vx", False, r"switches the layers of the picture or the sound off \(run_vx\)"),
        ("run_ax", False, r"switches the layers of the picture or the sound off \(run_ax\)"),
    ],
)
def test_options_for_layers_are_refused_by_name(
    option: str, value: Any, message: str, load_case: Callable[..., Any]
) -> None:
    case = CASES["ltx2 2"]
    model = load_case("ltx2 2", ParallelLayout()).clone()
    model.model_options["transformer_options"][option] = value
    for sample in SAMPLERS:
        with pytest.raises(InvalidRequest, match=message):
            sample(model, case.samples(), positive=case.conditioning(1), negative=case.conditioning(2))


def test_a_picture_alone_is_refused(load_case: Callable[..., Any]) -> None:
    case = CASES["ltx2 2"]
    latent = {"samples": torch.zeros(case.latent)}
    for sample in SAMPLERS:
        with pytest.raises(InvalidRequest, match="takes a latent of 2 tensors, and this one has 1"):
            sample(
                load_case("ltx2 2", ParallelLayout()), latent, positive=case.conditioning(1),
                negative=case.conditioning(2),
            )  # fmt: skip
