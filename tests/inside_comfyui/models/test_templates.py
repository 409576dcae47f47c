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
from comfy_extras import (
    nodes_cfg,
    nodes_custom_sampler,
    nodes_edit_model,
    nodes_flux,
    nodes_hunyuan,
    nodes_qwen,
    nodes_sd3,
    nodes_wan,
)
from helpers import minimax_h3_vae
from helpers.executor import Executor, Given
from helpers.inside_fixtures import new_session, parts_of, relative_error
from helpers.loras import plain
from helpers.native_vaes import flux2_weights, hunyuan_video_weights, image_weights, video_weights
from helpers.own_templates import small, without_our_nodes
from natives.files import FILE_CASES
from safetensors.torch import save_file

from scripts import workflows

ALL_CASES = {
    "Flux.1 Kontext dev, image edit": ("flux dev", image_weights),
    "Flux.1 dev, text to image": ("flux dev", image_weights),
    "Flux.1 dev, text to image (Parallel Loader)": ("flux dev", image_weights),
    "Flux.2 dev, text to image": ("flux2 dev", flux2_weights),
    "HunyuanVideo, text to video": ("hunyuan_video t2v", hunyuan_video_weights),
    "Krea-2 turbo, text to image": ("krea2 turbo", video_weights),
    "MiniMax-H3, text to video with sound": ("minimax_h3 pruned", minimax_h3_vae.weights),
    "Qwen-Image, text to image": ("qwen_image image", video_weights),
    "Qwen-Image-Edit 2511, image edit": ("qwen_image edit 2511", video_weights),
    "SD3.5 large, text to image": ("sd3 3.5 large", image_weights),
    "Wan 2.2 14B, image to video": ("wan i2v 2.2", video_weights),
    "Wan 2.2 14B, text to video": ("wan t2v", video_weights),
    "Z-Image turbo, text to image": ("z_image turbo", image_weights),
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
    nodes_sd3.EmptySD3LatentImage, nodes_hunyuan.EmptyHunyuanLatentVideo, nodes_wan.WanImageToVideo,
    nodes_cfg.CFGNorm, nodes_edit_model.ReferenceLatent, nodes_qwen.TextEncodeQwenImageEditPlus,
    *(getattr(nodes_flux, name) for name in (
        "FluxGuidance", "EmptyFlux2LatentImage", "Flux2Scheduler", "FluxKontextMultiReferenceLatentMethod",
    )),
    *(getattr(nodes_custom_sampler, name) for name in (
        "RandomNoise", "BasicGuider", "KSamplerSelect", "BasicScheduler", "SamplerCustomAdvanced",
    )),
    *minimax_h3_nodes(),
)  # fmt: skip


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


def write_files(name: str, folder: Path) -> dict[str, Any]:
    """Write tiny files under the names that a workflow has, and return ComfyUI's own models of them."""
    case_name, vae_weights = CASES[name]
    case, natives = FILE_CASES[case_name], {}
    for i, file in enumerate(workflows.needed_files(name)):
        place = folder / file["directory"]
        place.mkdir(exist_ok=True)
        folder_paths.folder_names_and_paths[file["directory"]][0][:] = [str(place)]
        if file["directory"] in ("diffusion_models", "checkpoints"):
            natives[file["name"]] = replace(case).native(seed=i)
            weights = natives[file["name"]].model.diffusion_model.state_dict()
        elif file["directory"] == "vae":
            weights = vae_weights()
        elif file["directory"] == "loras":
            weights = plain(case.native(), "diffusion_model.", rank=4, seed=3)
        else:
            continue
        if file["directory"] == "checkpoints":
            weights = {f"model.diffusion_model.{key}": tensor for key, tensor in weights.items()}
            weights |= {f"first_stage_model.{key}": tensor for key, tensor in vae_weights().items()}
        save_file({key: tensor.clone().contiguous() for key, tensor in weights.items()}, place / file["name"])
    folder_paths.filename_list_cache.clear()
    Given.values = {"text": case.conditioning(1), "other text": case.conditioning(2)}
    return natives


RANKS = 2
"""What a workflow uses without a choice of devices. The backend has more where an earlier test needed them."""
ELSEWHERE = {
    *(f"Open-Sora {version}, text to video" for version in ("1.2", "2.0")), "LTX-2.3, text to video with sound",
    "CogVideoX 5B, text to video",
}  # fmt: skip
"""Workflows that the tests of Open-Sora, of ComfyUI's own templates, and of families that it lacks run."""


def test_every_workflow_with_files_is_here() -> None:
    assert {name for name in workflows.names() if workflows.needs_download(name)} == set(ALL_CASES) | ELSEWHERE


def _marks(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.grid] if "image edit" in name else []  # each takes as long as all others


@pytest.mark.parametrize("name", [pytest.param(name, marks=_marks(name)) for name in CASES])
@pytest.mark.daily(5)
def test_a_workflow_gives_the_latents_and_pixels_that_comfyui_alone_gives(
    name: str, executor: Executor, tmp_path: Path, native_loads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    minimax_h3_vae.narrow(monkeypatch)
    natives = write_files(name, tmp_path)
    prompt = small(name, workflows.api(name))
    latent, pixels = executor.run(prompt)
    assert native_loads == []
    alone = without_our_nodes(prompt, natives)
    reference, reference_pixels = executor.run(alone)
    assert all(each.std() > 0.01 for each in parts_of(reference["samples"]))
    assert relative_error(latent["samples"], reference["samples"]) < 1e-4
    assert relative_error(pixels, reference_pixels) < 1e-3


def test_both_models_of_wan_stay_loaded(executor: Executor, tmp_path: Path, backend: Client) -> None:
    name = "Wan 2.2 14B, text to video"
    files = {str(tmp_path / "diffusion_models" / file) for file in write_files(name, tmp_path)}
    prompt = small(name, workflows.api(name))
    for seed in (1, 2):
        prompt["11"]["inputs"]["noise_seed"] = seed
        executor.run(prompt)
        loads = [{model.path: model.loads for model in rank.models} for rank in backend.status().ranks]
        held = [{path: each.get(path) for path in files} for each in loads[:RANKS]]
        assert held == [dict.fromkeys(files, 1)] * RANKS
