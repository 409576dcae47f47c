"""A small model's file among ComfyUI's files, and ComfyUI's executor with our nodes for a MODEL."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import comfy.sd
import folder_paths
import pytest
from any_folder_name.nodes import ParallelDiT
from any_folder_name.nodes.layout import ParallelLayoutNode
from any_folder_name.nodes.loader import ParallelLoader
from any_folder_name.nodes.model import ParallelModel
from any_folder_name.nodes.sampler import ParallelSampler
from any_folder_name.parallel_backend.client.client import Client
from comfy_extras.nodes_pag import PerturbedAttentionGuidance
from helpers.executor import Executor, Given
from helpers.inside_fixtures import new_session
from helpers.parallel_model import CASE
from safetensors.torch import save_file

import nodes as core_nodes


@pytest.fixture(scope="module")
def small_native() -> Any:
    """A small MODEL of ComfyUI."""
    return CASE.native()


@pytest.fixture(scope="module")
def folder(small_native: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ComfyUI's ``diffusion_models``, with that MODEL's file."""
    folder: Path = tmp_path_factory.mktemp("diffusion_models")
    weights = small_native.model.diffusion_model.state_dict()
    save_file({name: tensor.clone().contiguous() for name, tensor in weights.items()}, folder / "tiny.safetensors")
    folder_paths.folder_names_and_paths["diffusion_models"][0][:] = [str(folder)]
    folder_paths.filename_list_cache.clear()
    return folder


@pytest.fixture
def native_loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that ComfyUI's own loaders have read."""
    loads: list[str] = []
    load = comfy.sd.load_diffusion_model

    def recorded(path: str, **options: Any) -> Any:
        loads.append(Path(path).name)
        return load(path, **options)

    monkeypatch.setattr(comfy.sd, "load_diffusion_model", recorded)
    return loads


@pytest.fixture
def executor(folder: Path, backend: Client) -> Executor:
    """ComfyUI's executor, with what the prompts take as given."""
    new_session(backend)
    Given.values = {
        "positive": CASE.conditioning(1),
        "negative": CASE.conditioning(2, shorter=3),
        "latent": CASE.samples(),
    }
    return Executor(ParallelModel, ParallelLoader, ParallelLayoutNode, ParallelSampler, PerturbedAttentionGuidance)


@pytest.fixture(scope="module")
def _classes() -> None:
    """All of ComfyUI's node classes, and ours."""
    asyncio.run(core_nodes.init_extra_nodes(init_custom_nodes=False, init_api_nodes=False))
    Executor(*asyncio.run(ParallelDiT().get_node_list()))


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
    yield tmp_path
    for name, paths in kinds.items():
        folder_paths.folder_names_and_paths[name][0][:] = paths
    folder_paths.filename_list_cache.clear()
