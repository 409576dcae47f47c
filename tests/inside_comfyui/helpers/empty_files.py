"""Whole workflows before ComfyUI's own validation, with empty files of the names that they load."""

import asyncio
import uuid
from functools import cache
from pathlib import Path
from typing import Any

import execution
import folder_paths
import pytest
from helpers.executor import Prompt

import nodes as core_nodes

MODELS = (".safetensors", ".gguf", ".pth", ".pt", ".ckpt", ".sft", ".bin")
MEDIA = {"LoadImage": "image", "LoadVideo": "file", "LoadAudio": "audio", "LoadImageMask": "image"}


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


def make_media(prompt: Prompt, place: Path) -> None:
    """Make an empty file for each picture, video and sound that a prompt loads."""
    for node in prompt.values():
        name = node["inputs"].get(MEDIA.get(node["class_type"], ""))
        if isinstance(name, str):
            (place / "input" / name).touch()


def make_files(prompt: Prompt, place: Path) -> None:
    """Make an empty file for each name in a prompt, in the folders that its node class lists."""
    make_media(prompt, place)
    for node in prompt.values():
        kind = node["class_type"]
        names = [each for each in node["inputs"].values() if isinstance(each, str) and each.lower().endswith(MODELS)]
        for folder in kinds_of(kind) if names else ():
            for name in names:
                (place / folder / name).parent.mkdir(parents=True, exist_ok=True)
                (place / folder / name).touch()
    folder_paths.filename_list_cache.clear()


def problem(prompt: Prompt) -> Any:
    """What ComfyUI's validation has against a prompt; None if nothing."""
    valid, error, _, problems = asyncio.run(execution.validate_prompt(uuid.uuid4().hex, prompt, None))
    return None if valid else (error, problems)
