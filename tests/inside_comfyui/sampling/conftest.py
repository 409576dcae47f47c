"""The models that nodes are tried with, natively and behind our loader."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import folder_paths
import pytest
import torch
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from helpers import custom_cases
from helpers.inside_fixtures import Loaded
from helpers.node_sweep import CUSTOM, Subject, custom_subject, native_subject
from safetensors.torch import save_file


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with what nodes load from files."""
    for kind, suffix in (("loras", ".safetensors"), ("hypernetworks", ".pt")):
        monkeypatch.setitem(folder_paths.folder_names_and_paths, kind, ([str(tmp_path)], {suffix}))
    layer = {"linear.0.weight": torch.ones(768, 768), "linear.0.bias": torch.ones(768)}
    torch.save({768: [layer, layer]}, tmp_path / "hypernetwork.pt")
    return tmp_path


@pytest.fixture
def subject_of(models: Path, files: Path) -> Callable[[str], Subject]:
    """``subject_of(name)`` returns a model, whose checkpoint and LoRA are files."""

    def create(name: str) -> Subject:
        if name in CUSTOM and not (models / CUSTOM[name]).exists():
            custom_cases.CASES[CUSTOM[name]].write(models / CUSTOM[name])
        subject = custom_subject(name, models / CUSTOM[name]) if name in CUSTOM else native_subject(name)
        scene = subject.native.scene
        save_file(scene.lora, files / f"{scene.family}.safetensors")
        return subject

    return create


@pytest.fixture
def load_subject(
    load_case: Callable[..., Any], load_remote: Callable[..., Loaded]
) -> Callable[[Subject, ParallelLayout], Any]:
    """``load_subject(subject, layout)`` returns its parallel MODEL."""

    def load(subject: Subject, layout: ParallelLayout) -> Any:
        if subject.case in CUSTOM.values():
            return load_remote(layout, name=subject.case).model
        return subject.patch(load_case(subject.case, layout))

    return load
