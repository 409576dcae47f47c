"""ComfyUI's official templates of MiniMax-H3 and LTX-2, run with small random files of the official names.

Each runs as it is and with Parallel Model behind its loaders, and both give the same latents, pixels and sounds. What
changes of a template is its size in pixels and seconds, and a value that only newer versions of ComfyUI know.
"""

import asyncio
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import execution
import folder_paths
import pytest
import torch
from any_folder_name.nodes.layout import ParallelLayoutNode
from any_folder_name.nodes.loader import ParallelLoader
from any_folder_name.nodes.model import ParallelModel
from any_folder_name.nodes.vae import ParallelVAE
from any_folder_name.parallel_backend.client.client import Client
from helpers.executor import Executor, Prompt
from helpers.inside_fixtures import new_session, relative_error
from helpers.own_templates import without_our_nodes
from natives import CASES

import nodes as core_nodes
from scripts import official_templates, workflows
from scripts.install import templates_folder

has_classes = "minimax_h3 pruned" in CASES and "ltx2 2.5" in CASES
if has_classes:
    from helpers import official_files, shrunk_core

pytestmark = [
    pytest.mark.newest,
    pytest.mark.skipif(not has_classes, reason="this version of ComfyUI has no MiniMax-H3 or no LTX-2.5"),
    pytest.mark.skipif(not templates_folder().is_dir(), reason="the templates are not installed: bash scripts/test.sh"),
]
CLOSE, ROUNDED = 1e-4, 0.05
"""Relative differences: of sums in another order, and of 8-bit numbers, to which ComfyUI alone rounds."""
EVERYDAY = ("image_minimax_h3_t2i",)
"""The others run with the grid."""
RUN = (
    "image_minimax_h3_t2i",
    "video_minimax_h3_t2v", "video_minimax_h3_i2v", "video_minimax_h3_r2v", "video_minimax_h3_i2v_continuation",
    "video_minimax_h3_multiframe_reference", "template_ltx2_3_ic_lora_ingredients", "template_ltx2_3_style_transition",
    "video_ltx2_3_flf2v", "video_ltx2_3_i2v", "video_ltx2_3_ia2v", "video_ltx2_3_ic_lora", "video_ltx2_3_id_lora",
    "video_ltx2_3_t2v", "video_ltx2_5_flf2v", "video_ltx2_5_i2v", "video_ltx2_5_t2v", "video_ltx2_t2v",
    "video_ltx2_i2v", "video_ltx2_t2v_distilled", "video_ltx2_i2v_distilled",
    "video_ltx2_canny_to_video",
)  # fmt: skip
WITH_VAE = ("video_ltx2_3_i2v", "video_ltx2_i2v_distilled")
"""Templates that also run with Parallel VAE behind the checkpoint: one of LTX-2.3, with the latent upsampler."""
LACKING = {
    "video_fasth3_ominiref_r2v": {"BlockSparseAttention"},
    "video_fastvideo_fasth3_i2v": {"BlockSparseAttention"},
    "video_fastvideo_fasth3_t2v": {"BlockSparseAttention"},
    "video_minimax_h3_fun_controlnet_union": {"MiniMaxH3FunControlNetApply"},
}
"""Templates for newer versions, with the nodes that ComfyUI 0.33.0 lacks."""

OTHERS = {
    "video_ltx2_depth_to_video": "its depth comes from Lotus, a UNet of the size of Stable Diffusion 2",
    "video_ltx2_i2v_lora": "its graph has no link from the subgraph's video to Save Video",
}
"""Templates that are not run, with the reason."""

NEWER = {("CreateVideo", "bit_depth", "auto"): 8}
"""Values of newer versions, and what ComfyUI 0.33.0 has instead."""

FOLDERS = {
    ("UNETLoader", "unet_name"): "diffusion_models", ("CheckpointLoaderSimple", "ckpt_name"): "checkpoints",
    ("LTXVAudioVAELoader", "ckpt_name"): "checkpoints", ("LTXAVTextEncoderLoader", "ckpt_name"): "checkpoints",
    ("LTXAVTextEncoderLoader", "text_encoder"): "text_encoders", ("CLIPLoader", "clip_name"): "text_encoders",
    ("VAELoader", "vae_name"): "vae", ("LoraLoader", "lora_name"): "loras",
    ("LoraLoaderModelOnly", "lora_name"): "loras", ("LatentUpscaleModelLoader", "model_name"): "latent_upscale_models",
    ("LoadMoGeModel", "model_name"): "geometry_estimation", ("LoadImage", "image"): "input",
    ("LoadVideo", "file"): "input", ("LoadAudio", "audio"): "input",
}  # fmt: skip
"""Where the files are that inputs name."""
LOADERS = ("UNETLoader", "CheckpointLoaderSimple")
DECODERS = ("VAEDecode", "VAEDecodeTiled", "VAEDecodeAudio", "LTXVAudioVAEDecode")
SIDES = (
    "width",
    "height",
    "target_width",
    "target_height",
    "longer_size",
    "resize_type.width",
    "resize_type.height",
    "resize_type.longer_size",
)


def info(name: str) -> dict[str, Any]:
    """Return what a server says about a node class."""
    cls: Any = core_nodes.NODE_CLASS_MAPPINGS[name]
    if hasattr(cls, "GET_NODE_INFO_V1"):
        found: dict[str, Any] = cls.GET_NODE_INFO_V1()
        return found
    return {"input": cls.INPUT_TYPES()}


def template(name: str) -> Prompt:
    """Return a template as the page of this ComfyUI queues it."""
    prompt = official_templates.prompt(name, info)
    for node in prompt.values():
        for key, value in node["inputs"].items():
            if isinstance(value, str):
                node["inputs"][key] = NEWER.get((node["class_type"], key, value), value)
    return prompt


def small(prompt: Prompt, name: str) -> Prompt:
    """Return a prompt of small size."""
    return {
        key: {**node, "inputs": {each: _smaller(name, node, each, value) for each, value in node["inputs"].items()}}
        for key, node in prompt.items()
    }


def _smaller(template: str, node: dict[str, Any], name: str, value: Any) -> Any:
    kind, of_h3 = node["class_type"], "minimax" in template
    if not isinstance(value, int | float) or isinstance(value, bool):
        return value
    if name in SIDES or (kind == "PrimitiveInt" and value >= 300):
        return max(64, round(value / 5 / 64) * 64)
    if name in ("length", "frames_number", "amount"):
        return min(value, 25)
    if name in ("megapixels", "resize_type.megapixels"):
        return 0.02 if kind == "ImageScaleToTotalPixels" else 0.1
    if name == "max_length":
        return 3
    if kind == "PrimitiveFloat":
        return value / 12 if of_h3 else min(value, 1.0)
    return 1 if kind == "PrimitiveInt" and not of_h3 and 5 <= value <= 9 else value


def parallel(prompt: Prompt) -> Prompt:
    """Return a prompt with Parallel Model behind each loader of a transformer."""
    loaders = [key for key, node in prompt.items() if node["class_type"] in LOADERS]
    found: Prompt = {
        f"parallel {key}": {"class_type": "ParallelModel", "inputs": {"model": [key, 0], "devices": "0,1"}}
        for key in loaders
    }
    for key, node in prompt.items():
        inputs = {
            name: [f"parallel {value[0]}", 0] if isinstance(value, list) and value[1] == 0 and value[0] in loaders
            else value for name, value in node["inputs"].items()
        }  # fmt: skip
        found[key] = {**node, "inputs": inputs}
    return found


def parallel_vae(prompt: Prompt) -> Prompt:
    """Return a prompt with Parallel VAE behind each checkpoint."""
    found: Prompt = {}
    for key, node in prompt.items():
        inputs = dict(node["inputs"])
        for name, value in inputs.items():
            of_checkpoint = isinstance(value, list) and prompt[value[0]]["class_type"] == "CheckpointLoaderSimple"
            if of_checkpoint and value[1] == 2:
                inputs[name] = [f"vae {value[0]}", 0]
                given = {"vae": value, "devices": "0,1"}
                found[f"vae {value[0]}"] = {"class_type": "ParallelVAE", "inputs": given}
        found[key] = {**node, "inputs": inputs}
    assert len(found) > len(prompt)
    return found


def recorded(prompt: Prompt) -> Prompt:
    """Return a prompt that records what goes into its decoders and what comes out."""
    found = dict(prompt)
    for key, node in prompt.items():
        if node["class_type"] in DECODERS:
            found[f"{key} in"] = {"class_type": "Recorder", "inputs": {"value": node["inputs"]["samples"]}}
            found[f"{key} out"] = {"class_type": "Recorder", "inputs": {"value": [key, 0]}}
    return found


def files_of(prompt: Prompt) -> set[tuple[str, str]]:
    """Return folder and name of each file that a prompt loads."""
    return {
        (FOLDERS[node["class_type"], name], value)
        for node in prompt.values()
        for name, value in node["inputs"].items()
        if (node["class_type"], name) in FOLDERS
    }


@pytest.fixture(scope="module")
def _classes() -> None:
    asyncio.run(core_nodes.init_extra_nodes(init_custom_nodes=False, init_api_nodes=False))


@pytest.fixture
def place(tmp_path: Path, _classes: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of ComfyUI's models, inputs and outputs."""
    before = {name: list(entry[0]) for name, entry in folder_paths.folder_names_and_paths.items()}
    for name in {*FOLDERS.values()} - {"input"}:
        folder_paths.folder_names_and_paths[name][0][:] = [str(tmp_path / name)]
        (tmp_path / name).mkdir()
    (tmp_path / "input").mkdir()
    sizes: Any = sys.modules[core_nodes.NODE_CLASS_MAPPINGS["GetImageSize"].__module__]
    server = SimpleNamespace(send_progress_text=lambda *_: None)
    monkeypatch.setattr(sizes, "PromptServer", SimpleNamespace(instance=server))
    for kind in ("input", "output", "temp"):
        monkeypatch.setattr(folder_paths, f"{kind}_directory", str(tmp_path / kind))
    folder_paths.filename_list_cache.clear()
    yield tmp_path
    for name, paths in before.items():
        folder_paths.folder_names_and_paths[name][0][:] = paths
    folder_paths.filename_list_cache.clear()


@pytest.fixture
def executor(place: Path, backend: Client) -> Executor:
    new_session(backend)
    return Executor(ParallelModel, ParallelVAE, ParallelLoader, ParallelLayoutNode)


def test_every_template_is_known(place: Path) -> None:
    names = {path.stem for path in templates_folder().glob("*.json") if not path.name.startswith("api_")}
    of_both = {name for name in names if any(mark in name for mark in ("ltx2", "minimax_h3", "fasth3"))}
    assert of_both - set(RUN) - LACKING.keys() == OTHERS.keys()
    for name in (*RUN, *LACKING):
        lacking = official_templates.classes(name) - core_nodes.NODE_CLASS_MAPPINGS.keys()
        assert lacking == LACKING.get(name, set()), name


def test_the_page_names_every_template_and_whether_it_runs() -> None:
    page = Path(official_templates.__file__).parents[1] / "docs" / "video-with-sound.md"
    rows = [line.strip("| ").split(" | ") for line in page.read_text(encoding="utf-8").splitlines()]
    outcomes = {row[0].strip("`"): row[-1] for row in rows if row[0].startswith("`") and len(row) == 4}
    assert outcomes.keys() == {*RUN, *LACKING, *OTHERS}
    assert {name for name, outcome in outcomes.items() if outcome == "runs"} == set(RUN)
    for name, nodes in LACKING.items():
        assert all(node in outcomes[name] for node in nodes)


@pytest.mark.parametrize("name", RUN)
def test_a_template_validates_with_empty_files(name: str, place: Path, executor: Executor) -> None:
    prompt = parallel(template(name))
    for folder, file in files_of(prompt):
        (place / folder / file).touch()
    valid, error, outputs, problems = asyncio.run(execution.validate_prompt(uuid.uuid4().hex, prompt, None))
    assert valid, (error, problems)
    assert outputs


def _marks(name: str) -> list[pytest.MarkDecorator]:
    return [] if name in EVERYDAY else [pytest.mark.grid]


@pytest.mark.parametrize("name", [pytest.param(name, marks=_marks(name)) for name in RUN])
def test_a_template_runs_on_ranks_as_in_comfyui_alone(
    name: str, place: Path, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrunk_core.shrink(monkeypatch)
    alone = recorded(small(template(name), name))
    _check(alone, parallel(alone), place, executor)


@pytest.mark.grid
@pytest.mark.parametrize("name", WITH_VAE)
def test_a_template_with_parallel_vae_gives_the_same(
    name: str, place: Path, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrunk_core.shrink(monkeypatch)
    alone = recorded(small(template(name), name))
    _check(alone, parallel_vae(parallel(alone)), place, executor)


def test_our_own_template_of_ltx_runs_on_ranks_as_in_comfyui_alone(
    place: Path, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrunk_core.shrink(monkeypatch)
    ours = recorded(small(workflows.api("LTX-2.3, text to video with sound"), "ltx2"))
    _check(without_our_nodes(ours, {}), ours, place, executor)


def _check(alone: Prompt, with_ours: Prompt, place: Path, executor: Executor) -> None:
    """Run both, with small files, and compare what went into decoders and what came out."""
    for folder, file in files_of(alone):
        write = official_files.write_media if folder == "input" else official_files.write
        write(place / folder / file)
    folder_paths.filename_list_cache.clear()
    saving = [key for key, node in alone.items() if node["class_type"].startswith("Save")]
    reference = executor.run(alone, *saving)
    ours = executor.run(with_ours, *saving)
    assert len(ours) == len(reference) >= 2
    rounded = _rounds(files_of(alone))
    for value, wanted in zip(ours, reference, strict=True):
        _compare(value, wanted, rounded=rounded)
    assert len(list((place / "output").rglob("*.*"))) == 2 * len(saving)


def _rounds(files: set[tuple[str, str]]) -> bool:
    """Whether ComfyUI computes with 8-bit activations, or rounds weights in fp8 once a LoRA is in them."""
    models = {file for folder, file in files if folder in ("diffusion_models", "checkpoints")}
    with_lora = any(folder == "loras" for folder, _ in files)
    return any("int8" in file or ("fp8" in file and with_lora) for file in models)


def _compare(ours: Any, wanted: Any, *, rounded: bool) -> None:
    """Compare a LATENT, an IMAGE or an AUDIO."""
    if isinstance(wanted, dict):
        kind = "samples" if "samples" in wanted else "waveform"
        ours, wanted = ours[kind], wanted[kind]
    for one, other in zip(_parts(ours), _parts(wanted), strict=True):
        assert other.isfinite().all()
        assert other.std() > 1e-3
        if rounded:
            assert (one - other).norm() < ROUNDED * other.norm()
        else:
            assert relative_error(one, other) < CLOSE


def _parts(value: torch.Tensor) -> list[torch.Tensor]:
    return list(value.unbind()) if value.is_nested else [value]
