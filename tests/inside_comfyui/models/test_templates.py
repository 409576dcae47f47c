"""The example workflows with model files: run with tiny files of the same names, and compared with ComfyUI alone."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import comfy.sd
import folder_paths
import pytest
from any_folder_name.nodes.loader import ParallelLoader
from any_folder_name.nodes.model import ParallelModel
from any_folder_name.nodes.sampler import ParallelSampler
from any_folder_name.nodes.vae import ParallelVAE, ParallelVAEDecode
from any_folder_name.parallel_backend.client.client import Client
from comfy_extras import nodes_custom_sampler, nodes_flux, nodes_hunyuan, nodes_sd3
from helpers import minimax_h3_vae
from helpers.executor import Executor, Given, Prompt
from helpers.inside_fixtures import new_session, parts_of, relative_error
from helpers.loras import plain
from helpers.native_vaes import image_weights, video_weights
from natives.files import FILE_CASES
from safetensors.torch import save_file

from scripts import workflows

ALL_CASES = {
    "text to image (Parallel Model, Krea-2)": ("krea2 turbo", video_weights),
    "text to image (Parallel Model, Z-Image)": ("z_image turbo", image_weights),
    "text to image (Parallel Loader, Flux.1 file)": ("flux dev", image_weights),
    "text to video (Parallel Model, Wan 2.2)": ("wan t2v", video_weights),
    "text to video with sound (Parallel Model, MiniMax-H3)": ("minimax_h3 pruned", minimax_h3_vae.weights),
}
"""By workflow: the model in its files, and the weights of its VAE."""
CASES = {name: case for name, case in ALL_CASES.items() if case[0] in FILE_CASES}
"""Those whose model this version of ComfyUI has."""


def minimax_h3_nodes() -> list[Any]:
    """Return what makes its latents. Older versions of ComfyUI lack it."""
    try:
        from comfy_extras.nodes_minimax_h3 import EmptyMiniMaxH3LatentAV
    except ImportError:
        return []
    return [EmptyMiniMaxH3LatentAV]


NODES = (
    ParallelLoader, ParallelModel, ParallelSampler, ParallelVAE, ParallelVAEDecode,
    nodes_sd3.EmptySD3LatentImage, nodes_hunyuan.EmptyHunyuanLatentVideo, nodes_flux.FluxGuidance,
    *(getattr(nodes_custom_sampler, name) for name in (
        "RandomNoise", "BasicGuider", "KSamplerSelect", "BasicScheduler", "SamplerCustomAdvanced",
    )),
    *minimax_h3_nodes(),
)  # fmt: skip
LEFT_OUT = ("Save", "CreateVideo", "CLIPLoader", "DualCLIPLoader", "VAEDecodeAudio")
"""Beginnings of classes whose files are not made, or whose outputs are not looked at."""
SMALL = {"width": 72, "height": 88, "length": 9, "steps": 4, "end_at_step": 2, "start_at_step": 2}
"""Values that replace a workflow's. The first sampler of two ends, and the second one begins, in the middle."""


@pytest.fixture
def native_loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The diffusion models that ComfyUI has read."""
    loads: list[str] = []
    load: Callable[..., Any] = comfy.sd.load_diffusion_model
    monkeypatch.setattr(comfy.sd, "load_diffusion_model", lambda path, **options: loads.append(path) or load(path))
    return loads


@pytest.fixture
def executor(backend: Client) -> Executor:
    new_session(backend)
    return Executor(*NODES)


def small(prompt: Prompt) -> Prompt:
    """Return a workflow of small size, without text encoders, and with recorders of latents and pixels for outputs."""
    kept: Prompt = {}
    for key, node in prompt.items():
        inputs = {name: _smaller(name, value) for name, value in node["inputs"].items()}
        if node["class_type"] == "CLIPTextEncode":
            node, inputs = {"class_type": "Given"}, {"key": "text" if inputs["text"][0] == "a" else "other text"}
        if node["class_type"].endswith("VAEDecode"):
            kept["latent"] = {"class_type": "Recorder", "inputs": {"value": inputs["samples"]}}
            kept["pixels"] = {"class_type": "Recorder", "inputs": {"value": [key, 0]}}
        if not node["class_type"].startswith(LEFT_OUT):
            kept[key] = {"class_type": node["class_type"], "inputs": inputs}
    return kept


def _smaller(name: str, value: Any) -> Any:
    return SMALL[name] if name in SMALL and 0 < value < 10_000 else value


def without_our_nodes(prompt: Prompt, model: Any) -> Prompt:
    """Return a workflow in which our nodes are bypassed, and our loader and sampler are ComfyUI's."""
    replaced = {"ParallelSampler": "KSampler", "ParallelVAEDecode": "VAEDecode"}
    native: Prompt = {}
    for key, node in prompt.items():
        kind, inputs = replaced.get(node["class_type"], node["class_type"]), dict(node["inputs"])
        inputs.pop("tile", None)
        if kind in ("ParallelLoader", "UNETLoader"):
            name = inputs.get("unet_name", "model")
            Given.values[name] = model[name] if isinstance(model, dict) else model
            kind, inputs = "Given", {"key": name}
        native[key] = {"class_type": kind, "inputs": {name: bypassed(prompt, value) for name, value in inputs.items()}}
    return {key: node for key, node in native.items() if node["class_type"] not in ("ParallelModel", "ParallelVAE")}


def bypassed(prompt: Prompt, value: Any) -> Any:
    """Return a link as the page makes it when our nodes before it are bypassed."""
    while isinstance(value, list) and prompt[value[0]]["class_type"] in ("ParallelModel", "ParallelVAE"):
        inputs = prompt[value[0]]["inputs"]
        value = inputs.get("model", inputs.get("vae"))
    return value


def write_files(name: str, folder: Path) -> dict[str, Any]:
    """Write tiny files under the names that a workflow has, and return ComfyUI's own models of them."""
    case_name, vae_weights = CASES[name]
    case, natives = FILE_CASES[case_name], {}
    for i, file in enumerate(workflows.needed_files(name)):
        place = folder / file["directory"]
        place.mkdir(exist_ok=True)
        folder_paths.folder_names_and_paths[file["directory"]][0][:] = [str(place)]
        if file["directory"] == "diffusion_models":
            natives[file["name"]] = replace(case).native(seed=i)
            weights = natives[file["name"]].model.diffusion_model.state_dict()
        elif file["directory"] == "vae":
            weights = vae_weights()
        elif file["directory"] == "loras":
            weights = plain(case.native(), "diffusion_model.", rank=4, seed=3)
        else:
            continue
        save_file({key: tensor.clone().contiguous() for key, tensor in weights.items()}, place / file["name"])
    folder_paths.filename_list_cache.clear()
    Given.values = {"text": case.conditioning(1), "other text": case.conditioning(2)}
    return natives


RANKS = 2
"""What a workflow uses without a choice of devices. The backend has more where an earlier test needed them."""
ELSEWHERE = {f"text to video (Parallel Loader, Open-Sora {version} file)" for version in ("1.2", "2.0")}
"""Workflows with a model that ComfyUI does not have, which the family's own tests run."""


def test_every_workflow_with_files_is_here() -> None:
    assert {name for name in workflows.names() if workflows.needed_files(name)} == set(ALL_CASES) | ELSEWHERE


@pytest.mark.parametrize("name", CASES)
def test_a_workflow_gives_the_latents_and_pixels_that_comfyui_alone_gives(
    name: str, executor: Executor, tmp_path: Path, native_loads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    minimax_h3_vae.narrow(monkeypatch)
    natives = write_files(name, tmp_path)
    prompt = small(workflows.api(name))
    latent, pixels = executor.run(prompt)
    assert native_loads == []
    alone = without_our_nodes(prompt, natives if len(natives) > 1 else next(iter(natives.values())))
    reference, reference_pixels = executor.run(alone)
    assert all(each.std() > 0.01 for each in parts_of(reference["samples"]))
    assert relative_error(latent["samples"], reference["samples"]) < 1e-4
    assert relative_error(pixels, reference_pixels) < 1e-3


def test_both_models_of_wan_stay_loaded(executor: Executor, tmp_path: Path, backend: Client) -> None:
    name = "text to video (Parallel Model, Wan 2.2)"
    files = {str(tmp_path / "diffusion_models" / file) for file in write_files(name, tmp_path)}
    prompt = small(workflows.api(name))
    for seed in (1, 2):
        prompt["11"]["inputs"]["noise_seed"] = seed
        executor.run(prompt)
        loads = [{model.path: model.loads for model in rank.models} for rank in backend.status().ranks]
        held = [{path: each.get(path) for path in files} for each in loads[:RANKS]]
        assert held == [dict.fromkeys(files, 1)] * RANKS
