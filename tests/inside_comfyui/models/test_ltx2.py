"""LTX-2 beyond what all families have: its text connectors, refusals, and the kinds of its LoRAs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.sd
import folder_paths
import pytest
import torch
from any_folder_name.nodes.families.registry import bridge_for
from any_folder_name.parallel_backend.checkpoint.opening import open_checkpoint
from any_folder_name.parallel_backend.errors import InvalidRequest
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from helpers.inside_fixtures import Loaded, ksampler, native_case, parallel_sampler, relative_error
from natives import CASES, ltx2
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


@runs_connectors
def test_a_lora_of_connectors_is_refused(load_case: Callable[..., Any]) -> None:
    case, layer = CASES["ltx2 2"], "diffusion_model.video_embeddings_connector.transformer_1d_blocks.0.attn1.to_q"
    lora = {f"{layer}.lora_A.weight": torch.ones(2, 60), f"{layer}.lora_B.weight": torch.ones(60, 2)}
    model, _ = comfy.sd.load_lora_for_models(load_case("ltx2 2", ParallelLayout()), None, lora, 1.0, 0)
    for sample in SAMPLERS:
        with pytest.raises(InvalidRequest, match="a layer of the prompt"):
            sample(model, case.samples(), positive=case.conditioning(1), negative=case.conditioning(2))


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("a2v_cross_attn", False, "LTXVModalityGuidance"),
        ("run_vx", False, "switches a part of the layers off"),
        ("stg_self_attn_blocks", frozenset({1}), "LTXVSpatioTemporalGuidance"),
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


@pytest.mark.skipif("ltx2 2.3 guide" not in CASES, reason="this version of ComfyUI has no guides with strengths")
def test_a_guide_of_another_strength_is_refused(load_case: Callable[..., Any]) -> None:
    case = CASES["ltx2 2.3 guide"]
    ((text, extra),) = case.conditioning(1)
    entry = {**extra["guide_attention_entries"][0], "strength": 0.5}
    prompt = [[text, {**extra, "guide_attention_entries": [entry]}]]
    for sample in SAMPLERS:
        with pytest.raises(InvalidRequest, match=r"a guide of strength 0\.5"):
            sample(load_case("ltx2 2.3 guide", ParallelLayout()), case.samples(), positive=prompt, negative=prompt)


def test_a_picture_alone_is_refused(load_case: Callable[..., Any]) -> None:
    case = CASES["ltx2 2"]
    latent = {"samples": torch.zeros(case.latent)}
    for sample in SAMPLERS:
        with pytest.raises(InvalidRequest, match="takes a latent of 2 tensors, and this one has 1"):
            sample(
                load_case("ltx2 2", ParallelLayout()), latent, positive=case.conditioning(1),
                negative=case.conditioning(2),
            )  # fmt: skip
