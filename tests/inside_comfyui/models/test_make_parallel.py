"""Official templates made parallel: with empty files of the right names they validate as they do alone."""

import asyncio
import json
import uuid
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import execution
import folder_paths
import pytest
from any_folder_name.nodes.layout import ParallelLayoutNode
from any_folder_name.nodes.loader import ParallelLoader
from any_folder_name.nodes.model import ParallelModel
from any_folder_name.nodes.panel.making_parallel import made_parallel, reason_of_file
from any_folder_name.nodes.vae import ParallelVAE
from any_folder_name.parallel_backend.make_parallel.workflow import make_parallel
from helpers.executor import Executor, Prompt

import nodes as core_nodes
from scripts import official_templates
from scripts.install import templates_folder

pytestmark = [
    pytest.mark.newest,
    pytest.mark.skipif(not templates_folder().is_dir(), reason="the templates are not installed: bash scripts/test.sh"),
]
MODELS = (".safetensors", ".gguf", ".pth", ".pt", ".ckpt", ".sft", ".bin")
MEDIA = {"LoadImage": "image", "LoadVideo": "file", "LoadAudio": "audio", "LoadImageMask": "image"}
WANTED = 30


@pytest.fixture(scope="module")
def _classes() -> None:
    asyncio.run(core_nodes.init_extra_nodes(init_custom_nodes=False, init_api_nodes=False))


@pytest.fixture
def place(tmp_path: Path, _classes: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of all of ComfyUI's models and inputs."""
    kinds = {name: list(entry[0]) for name, entry in folder_paths.folder_names_and_paths.items()}
    for name in kinds.keys() - {"custom_nodes"}:
        folder_paths.folder_names_and_paths[name][0][:] = [str(tmp_path / name)]
        (tmp_path / name).mkdir()
    monkeypatch.setattr(folder_paths, "input_directory", str(tmp_path / "input"))
    (tmp_path / "input").mkdir(exist_ok=True)
    folder_paths.filename_list_cache.clear()
    Executor(ParallelModel, ParallelVAE, ParallelLoader, ParallelLayoutNode)  # registers them
    yield tmp_path
    for name, paths in kinds.items():
        folder_paths.folder_names_and_paths[name][0][:] = paths
    folder_paths.filename_list_cache.clear()


@cache
def info(name: str) -> dict[str, Any]:
    """What a server says about a node class. Its lists of files are those of the first call."""
    cls: Any = core_nodes.NODE_CLASS_MAPPINGS[name]
    return cls.GET_NODE_INFO_V1() if hasattr(cls, "GET_NODE_INFO_V1") else {"input": cls.INPUT_TYPES()}


@cache
def kinds_of(name: str) -> frozenset[str]:
    """The kinds of files that a node class lists."""
    asked: set[str] = set()
    listed = folder_paths.get_filename_list
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folder_paths, "get_filename_list", lambda kind: asked.add(kind) or listed(kind))
        info.__wrapped__(name)
    return frozenset(asked)


def make_files(prompt: Prompt, place: Path) -> None:
    """Make an empty file for each name in a prompt, in the folders that its node class lists."""
    for node in prompt.values():
        kind = node["class_type"]
        media = node["inputs"].get(MEDIA.get(kind, ""))
        if isinstance(media, str):
            (place / "input" / media).touch()
        names = [each for each in node["inputs"].values() if isinstance(each, str) and each.lower().endswith(MODELS)]
        for folder in kinds_of(kind) if names else ():
            for name in names:
                (place / folder / name).parent.mkdir(parents=True, exist_ok=True)
                (place / folder / name).touch()
    folder_paths.filename_list_cache.clear()


def problem(prompt: Prompt) -> Any:
    valid, error, _, problems = asyncio.run(execution.validate_prompt(uuid.uuid4().hex, prompt, None))
    return None if valid else (error, problems)


def candidates() -> Iterator[tuple[str, dict[str, Any]]]:
    """Templates with a loader of ours to follow, and no class that this ComfyUI lacks."""
    for path in sorted(templates_folder().glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if "nodes" not in content or not make_parallel(content).added:
            continue
        if official_templates.classes(path.stem) <= core_nodes.NODE_CLASS_MAPPINGS.keys():
            yield path.stem, content


def test_templates_validate_as_they_do_alone(place: Path) -> None:
    validated, worse = list[str](), list[str]()
    for name, content in list(candidates())[::4]:
        alone = official_templates.prompt_of(content, info)
        make_files(alone, place)
        if problem(alone) is not None:
            continue
        prompt = official_templates.prompt_of(made_parallel(content)["workflow"], info)
        assert sum(node["class_type"].startswith("Parallel") for node in prompt.values()) > 0, name
        found = problem(prompt)
        (validated if found is None else worse).append(f"{name} {found or ''}"[:300])
    assert worse == []
    assert len(validated) >= WANTED


def test_a_file_is_looked_at_if_it_is_here_and_not_empty(place: Path) -> None:
    assert reason_of_file("UNETLoader", "none.safetensors", "MODEL") == ""
    (place / "diffusion_models" / "empty.safetensors").touch()
    folder_paths.filename_list_cache.clear()
    assert reason_of_file("UNETLoader", "empty.safetensors", "MODEL") == ""
    (place / "diffusion_models" / "text.safetensors").write_text("no weights in here")
    (place / "vae" / "text.safetensors").write_text("no weights in here")
    folder_paths.filename_list_cache.clear()
    for loader, kind in (("UNETLoader", "MODEL"), ("VAELoader", "VAE")):
        assert "text.safetensors" in reason_of_file(loader, "text.safetensors", kind)
