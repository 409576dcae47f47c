"""Nodes that need a model's layers are refused with what they do, and before weights load if the prompt shows them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from any_folder_name.parallel_backend.errors import InvalidRequest
from comfy_extras.nodes_slg import SkipLayerGuidanceDiT
from comfy_extras.nodes_torch_compile import TorchCompileModel
from helpers.inside_fixtures import Loaded, empty_latent, ksampler, loader_node, parallel_sampler

Patch = Callable[[Any], Any]


def skip_layers(model: Any) -> Any:
    return SkipLayerGuidanceDiT.execute(model, 3.0, 0.0, 1.0, "0", "0").args[0]


def option(name: str, value: Any) -> Patch:
    """Return a patch that sets an option in ``transformer_options``, like such a node."""

    def patch(model: Any) -> Any:
        model.model_options["transformer_options"][name] = value
        return model

    return patch


PATCHES: dict[str, tuple[Patch, str]] = {
    "HyperTile": (option("patches", {"attn1_patch": [print]}), "a node changes what .* HyperTile"),
    "TorchCompileModel": (
        lambda model: TorchCompileModel.execute(model, "inductor").args[0],
        "a node compiles the model, as TorchCompileModel does",
    ),
    "ScaleROPE": (option("rope_options", {"scale_x": 2.0}), "a node scales or shifts the positions .* ScaleROPE"),
    "attention": (
        option("optimized_attention_override", print),
        "a node chooses an attention kernel, .* Parallel Loader has",
    ),
}


@pytest.mark.parametrize("sample", [ksampler, parallel_sampler])
@pytest.mark.parametrize(("patch", "message"), PATCHES.values(), ids=PATCHES)
def test_nodes_are_refused_before_sampling(
    loaded: Loaded, sample: Callable[..., Any], patch: Patch, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"^{message}.*: remove that node"):
        sample(patch(loaded.model.clone()), empty_latent())
    assert not loaded.client.requests


def test_skipping_layers_during_sampling_is_refused(loaded: Loaded) -> None:
    with pytest.raises(InvalidRequest, match=r"^a node skips or replaces layers .* SkipLayerGuidance .* remove that"):
        ksampler(skip_layers(loaded.model), empty_latent())
    with pytest.raises(InvalidRequest, match="sampler_post_cfg_function to the model's steps; use KSampler"):
        parallel_sampler(skip_layers(loaded.model), empty_latent())


@pytest.mark.parametrize("between", ["ModelSamplingSD3", "LoraLoaderModelOnly"])
def test_the_prompt_shows_skipped_layers(models: Path, between: str) -> None:
    node = loader_node()
    node.hidden.prompt = {
        "7": {"class_type": "ParallelLoader", "inputs": {}},
        "8": {"class_type": between, "inputs": {"model": ["7", 0]}},
        "9": {"class_type": "SkipLayerGuidanceDiT", "inputs": {"model": ["8", 0]}},
        "10": {"class_type": "SaveImage", "inputs": {"images": ["9", 0]}},
    }
    with pytest.raises(InvalidRequest, match=r"^SkipLayerGuidanceDiT skips or replaces layers .* remove that node"):
        node.execute("tiny", "fp32", "0,1")
    node.hidden.prompt["8"]["inputs"]["model"] = ["11", 0]
    node.hidden.prompt["11"] = {"class_type": "UNETLoader", "inputs": {}}
    assert node.execute("tiny", "fp32", "0,1").args
