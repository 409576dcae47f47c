"""The example workflows: with empty files of the names in their notes, in the folders named there, they validate."""

import json
from pathlib import Path
from typing import Any

import comfyui_version
import folder_paths
import pytest
from helpers.empty_files import info, make_media, problem

import nodes as core_nodes
from scripts import comfy_paths, official_templates, workflows

COMFYUI = comfy_paths.release(Path(comfyui_version.__file__).parent)
NAMES = [name for name in workflows.names() if workflows.needed_release(name) <= COMFYUI]
"""Those that this version of ComfyUI can run. The notes of the others say so."""


def make_files(name: str, place: Path) -> None:
    for file in workflows.needed_files(name):
        (place / file["directory"] / file["name"]).touch()
    for folder in workflows.needed_folders(name):
        (place / folder["directory"] / folder["name"]).mkdir()
        index = {"_class_name": "CogVideoXPipeline"}
        (place / folder["directory"] / folder["name"] / "model_index.json").write_text(json.dumps(index))
    folder_paths.filename_list_cache.clear()


@pytest.mark.parametrize("name", NAMES)
def test_a_workflow_validates_with_empty_files_of_the_names_in_its_note(name: str, place: Path) -> None:
    lacking = {node["class_type"] for node in workflows.api(name).values()} - core_nodes.NODE_CLASS_MAPPINGS.keys()
    if lacking:
        pytest.skip(f"this process of ComfyUI has no {', '.join(sorted(lacking))}")
    prompt = official_templates.prompt_of(workflows.graph(name), info)
    make_media(prompt, place)
    if workflows.needs_download(name):
        assert problem(prompt) is not None, "its files are not asked for"
    make_files(name, place)
    found = problem(prompt)
    assert found is None or refused_by_our_loader(found, place)


def refused_by_our_loader(found: Any, place: Path) -> bool:
    """Whether only Parallel Loader refuses a prompt: it reads what it has found, and an empty file is no model."""
    *_, errors = found
    by_ours = all(each["class_type"] == "ParallelLoader" for each in errors.values())
    return by_ours and all(str(place) in error["details"] for each in errors.values() for error in each["errors"])
