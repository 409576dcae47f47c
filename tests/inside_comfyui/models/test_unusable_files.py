"""Files with parts that cannot be used: refused before anything loads, and only where the part is wanted."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.sd
import folder_paths
import pytest
import torch
from any_folder_name.nodes.families.registry import bridge_for
from any_folder_name.nodes.loader import open_vae
from any_folder_name.nodes.remote.clip import checkpoint_clip
from any_folder_name.nodes.remote.preflight import CLIP_OUTPUT, VAE_OUTPUT, check_output
from any_folder_name.parallel_backend.checkpoint.opening import open_checkpoint
from any_folder_name.parallel_backend.errors import InvalidRequest
from helpers.inside_fixtures import loader_node, validated
from helpers.native_vaes import video_weights
from natives.files import FILE_CASES, FIRST_FILES, metadata
from safetensors.torch import save_file

Weights = dict[str, torch.Tensor]
NUMBER = torch.zeros(2, 2)
SCALE = {"vae.decoder.conv1.scale_weight": torch.ones(1)}
INTEGERS = {"vae.conv1.weight": torch.zeros(32, 32, 1, 1, 1, dtype=torch.int8)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder_paths.folder_names_and_paths["checkpoints"][0][:] = [str(tmp_path)]
    folder_paths.filename_list_cache.clear()
    return tmp_path


def transformer(native: Any) -> Weights:
    return {f"model.diffusion_model.{key}": each for key, each in native.model.diffusion_model.state_dict().items()}


def vae() -> Weights:
    return {f"vae.{key}": each for key, each in video_weights().items()}


def native_file(name: str) -> Weights:
    weights: Weights = FILE_CASES[name].native().model.diffusion_model.state_dict()
    return weights


def clip_of(path: Path, native: Any) -> Any:
    checkpoint = open_checkpoint(path)
    handle: Any = SimpleNamespace(checkpoint=checkpoint)
    return checkpoint_clip(handle, bridge_for(checkpoint).text, native)


def save(path: Path, *weights: Weights, said: dict[str, str] | None = None) -> Path:
    save_file({key: each.clone().contiguous() for part in weights for key, each in part.items()}, path, said)
    return path


@pytest.mark.parametrize(
    ("changed", "message"),
    [(SCALE, "decoder.conv1.scale_weight belongs to no layer"), (INTEGERS, "has dtype I8, which is not supported")],
)
def test_a_vae_whose_weights_cannot_be_read_is_refused_before_it_decodes(
    folder: Path, changed: Weights, message: str
) -> None:
    path = save(folder / "whole.safetensors", transformer(FILE_CASES["wan t2v"].native()), vae(), changed)
    with pytest.raises(InvalidRequest, match=f"whole.safetensors.* {message}"):
        open_vae(path, "0,1", "1")
    with pytest.raises(InvalidRequest, match=f"{message}.*; load one with ComfyUI's Load VAE node instead"):
        check_output(open_checkpoint(path), VAE_OUTPUT)
    assert validated("checkpoints/whole.safetensors") is True
    node = loader_node()
    node.hidden.prompt = {"9": {"class_type": "PreviewImage", "inputs": {"images": ["7", 2]}}}
    with pytest.raises(InvalidRequest, match=message):
        node.execute("checkpoints/whole.safetensors", "fp32", "0,1")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "holds no diffusion model"),
        ({"model.diffusion_model.input_blocks.0.0.weight": torch.zeros(2, 2)}, "whole.safetensors: the "),
    ],
)
def test_a_file_with_a_vae_alone_is_no_model(folder: Path, extra: Weights, message: str) -> None:
    path = save(folder / "whole.safetensors", vae(), extra)
    assert message in str(validated("checkpoints/whole.safetensors"))
    assert open_vae(path, "0,1", "1").checkpoint.components == {"vae": "AutoencoderKLWan"}


@pytest.mark.parametrize("known", [True, False])
def test_text_encoders_that_comfyui_does_not_find_are_refused_by_name(
    known: bool, folder: Path, native: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(folder / "whole.safetensors", transformer(native), {"text_encoders.umt5xxl.shared.weight": NUMBER})

    def find(path: str, **options: Any) -> Any:
        if known:
            return (None, None, None, None)
        raise RuntimeError(f"ERROR: Could not detect model type of: {path}")

    monkeypatch.setattr(comfy.sd, "load_checkpoint_guess_config", find)
    with pytest.raises(InvalidRequest, match=r"finds no text encoder of this model in whole.safetensors: .*Load CLIP"):
        clip_of(path, native).tokenize("a dog")


def test_other_models_names_of_text_encoders_do_not_count(folder: Path, native: Any) -> None:
    others = {"cond_stage_model.transformer.weight": NUMBER, "conditioner.embedders.0.weight": NUMBER}
    path = save(folder / "whole.safetensors", transformer(native), others)
    with pytest.raises(InvalidRequest, match=r"whole.safetensors has no text encoder; load one with .*Load CLIP"):
        check_output(open_checkpoint(path), CLIP_OUTPUT)
    with pytest.raises(InvalidRequest, match="has no text encoder"):
        clip_of(path, native).tokenize("a dog")


def test_text_encoders_in_parts_are_refused_before_comfyui_reads_one(folder: Path, native: Any) -> None:
    save(folder / "whole-00001-of-00002.safetensors", transformer(native))
    path = save(folder / "whole-00002-of-00002.safetensors", {"text_encoders.umt5xxl.shared.weight": NUMBER})
    assert open_checkpoint(path).components == {"transformer": "WanTransformer3DModel"}
    with pytest.raises(InvalidRequest, match=r"from a model in 2 parts; load one with ComfyUI's Load CLIP node"):
        check_output(open_checkpoint(path), CLIP_OUTPUT)


@pytest.mark.parametrize("name", FIRST_FILES)
def test_comfyui_looks_for_text_encoders_under_one_name(name: str, tmp_path: Path) -> None:
    save(tmp_path / "tiny.safetensors", native_file(name), said=metadata(FILE_CASES[name]))
    config = bridge_for(open_checkpoint(tmp_path / "tiny.safetensors")).core_config()
    # No published file of Chroma has text encoders. One that has is refused like a file without any.
    assert config.text_encoder_key_prefix == ["cond_stage_model." if name.startswith("chroma") else "text_encoders."]
