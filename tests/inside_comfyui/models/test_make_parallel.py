"""Official templates made parallel: with empty files of the right names they validate as they do alone."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import folder_paths
import pytest
from any_folder_name.nodes.panel.making_parallel import made_parallel, reason_of_file
from any_folder_name.parallel_backend.make_parallel.workflow import make_parallel
from helpers.empty_files import info, make_files, problem

import nodes as core_nodes
from scripts import official_templates
from scripts.install import templates_folder

pytestmark = [
    pytest.mark.newest,
    pytest.mark.skipif(not templates_folder().is_dir(), reason="the templates are not installed: bash scripts/test.sh"),
]
WANTED = 30


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
