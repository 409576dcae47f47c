"""Fixtures for tiny checkpoints: the same weights in ComfyUI's own models and behind our nodes."""

import asyncio
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import comfy.model_management
import folder_paths
import pytest
import torch
from any_folder_name.nodes import loader, sampler
from any_folder_name.nodes.backend import session
from any_folder_name.nodes.backend.held_models import HeldModels
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from any_folder_name.parallel_backend.processes import trim_heap
from any_folder_name.parallel_backend.protocol.messages import Progress
from any_folder_name.parallel_backend.step_loop.request_sampler import RequestSampler
from comfy_execution.graph import DynamicPrompt
from helpers import tiny_wan
from helpers.freeing_client import FreeingClient
from helpers.local_client import LocalClient
from natives import CASES

import nodes as core_nodes


def new_session(client: Any) -> None:
    """Begin a session in which a model that a test drops is not unloaded during the next test."""
    begun = session.Session(client)
    begun.held = HeldModels(lambda spec: True)
    session.use(begun)


def loader_node() -> Any:
    """Return the loader's class as ComfyUI prepares it to run as node 7."""
    return type(
        "Prepared",
        (loader.ParallelLoader,),
        {"hidden": SimpleNamespace(unique_id="7", prompt=None, dynprompt=DynamicPrompt({}))},
    )


def validated(model_name: str, dtype: str = "fp32", devices: str = "0,1") -> bool | str:
    """Return why Parallel Loader refuses inputs when a prompt is queued, or True."""
    checked: bool | str = asyncio.run(loader.ParallelLoader.validate_inputs(model_name, dtype, devices))
    return checked


@dataclass(frozen=True)
class Loaded:
    """The loader's three outputs, and the client that answers their requests."""

    model: Any
    clip: Any
    vae: Any
    client: LocalClient


@pytest.fixture(scope="session")
def native() -> Any:
    """ComfyUI's own Wan model."""
    return tiny_wan.native_model()


@pytest.fixture(scope="session")
def models(native: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ComfyUI's ``models/diffusers`` folder, with the pipeline ``tiny``."""
    folder: Path = tmp_path_factory.mktemp("diffusers")
    (folder / "tiny" / "tokenizer").mkdir(parents=True)
    tiny_wan.write(folder / "tiny", native)
    folder_paths.folder_names_and_paths["diffusers"][0][:] = [str(folder)]
    return folder


@pytest.fixture(scope="session")
def local(models: Path) -> LocalClient:
    """The client over diffusers' modules of ``tiny``."""
    return LocalClient(models / "tiny", RequestSampler, Progress)


@pytest.fixture
def load(models: Path, local: LocalClient) -> Callable[..., Loaded]:
    """``load(layout=...)`` runs Parallel Loader on ``tiny`` with two CPU ranks."""
    local.requests.clear()
    new_session(local)

    def run(
        layout: ParallelLayout | None = None, devices: str = "0,1", name: str = "tiny", dtype: str = "fp32"
    ) -> Loaded:
        return Loaded(*loader_node().execute(name, dtype, devices, layout).args, local)

    return run


@pytest.fixture
def loaded(load: Callable[..., Loaded]) -> Loaded:
    """The loader's outputs without a layout."""
    return load()


@pytest.fixture(scope="session")
def backend(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FreeingClient]:
    """A real backend in its own runtime folder."""
    client = FreeingClient(tmp_path_factory.mktemp("run"), idle_timeout=900.0)
    client.start()
    yield client
    client.stop()


@pytest.fixture
def load_remote(load: Callable[..., Loaded], backend: FreeingClient) -> Callable[..., Loaded]:
    """``load`` with the real backend."""

    def run(
        layout: ParallelLayout | None = None, name: str = "tiny", dtype: str = "fp32", devices: str = "0,1"
    ) -> Loaded:
        loaded = load(layout, name=name, dtype=dtype, devices=devices)
        session.current().client = backend
        return loaded

    return run


@lru_cache(maxsize=8)  # those of all cases take gigabytes
def native_case(name: str) -> Any:
    """Return ComfyUI's own model of a case."""
    return CASES[name].native()


@pytest.fixture
def load_case(
    models: Path, load_remote: Callable[..., Loaded], backend: FreeingClient, request: pytest.FixtureRequest
) -> Iterator[Callable[..., Any]]:
    """``load_case(name, layout)`` returns the MODEL of a case's checkpoint.

    A test of the grid frees its weights: those of all families in all layouts do not fit into memory.
    """

    def run(name: str, layout: ParallelLayout, dtype: str = "fp32", devices: str = "0,1") -> Any:
        if not (models / name).exists():
            CASES[name].write(models / name, native_case(name))
        return load_remote(layout, name=name, dtype=dtype, devices=devices).model

    yield run
    if request.node.get_closest_marker("grid"):
        backend.free()
        gc.collect()  # ComfyUI's models are part of cycles


@pytest.fixture(autouse=True, scope="module")
def freed(backend: FreeingClient, request: pytest.FixtureRequest) -> Iterator[None]:
    """Free the memory of the models of a module's tests, here and on the ranks: all together take 8 GB in each."""
    yield
    backend.free()
    for found in [native_case, *vars(request.module).values()]:
        if hasattr(found, "cache_clear"):
            found.cache_clear()
    gc.collect()
    trim_heap()


@pytest.fixture(autouse=True)
def not_interrupted() -> Iterator[None]:
    """Clear an interruption after each test."""
    yield
    comfy.model_management.interrupt_current_processing(False)


@pytest.fixture(autouse=True)
def same_folders() -> Iterator[None]:
    """Give ComfyUI back the folders of models that it had: those of a test are deleted when it has passed."""
    before = {kind: list(entry[0]) for kind, entry in folder_paths.folder_names_and_paths.items()}
    yield
    for kind, folders in before.items():
        folder_paths.folder_names_and_paths[kind][0][:] = folders
    folder_paths.filename_list_cache.clear()


def conditioning(seed: int, length: int = 12) -> list[Any]:
    """Return one random conditioning."""
    text = torch.randn(1, length, tiny_wan.TEXT_DIM, generator=torch.Generator().manual_seed(seed))
    return [[text, {"pooled_output": None}]]


def empty_latent(batch: int = 1, frames: int = 1, height: int = 6, width: int = 5) -> dict[str, Any]:
    """Return what an empty-latent node outputs. The odd default width is not a whole number of patches."""
    return {"samples": torch.zeros(batch, 16, frames, height, width)}


def ksampler(model: Any, latent: dict[str, Any], **options: Any) -> torch.Tensor:
    """Run ComfyUI's KSampler node."""
    return _sample(core_nodes.KSampler().sample, model, latent, options)[0]["samples"]


def parallel_sampler(model: Any, latent: dict[str, Any], **options: Any) -> torch.Tensor:
    """Run the Parallel Sampler node."""
    return run_parallel_sampler(model, latent, **options).args[0]["samples"]


def run_parallel_sampler(model: Any, latent: dict[str, Any], **options: Any) -> Any:
    """Run the Parallel Sampler node and return all that it outputs."""
    return _sample(sampler.ParallelSampler.execute, model, latent, options)


def _sample(node: Any, model: Any, latent: dict[str, Any], options: dict[str, Any]) -> Any:
    defaults = {
        "seed": 5, "steps": 3, "cfg": 4.0, "sampler_name": "euler", "scheduler": "simple",
        "positive": conditioning(1), "negative": conditioning(2), "denoise": 1.0,
    }  # fmt: skip
    return node(model=model, latent_image=latent, **(defaults | options))


def parts_of(latent: Any) -> list[torch.Tensor]:
    """Return the tensors of a nested latent, or the only one."""
    return list(latent.unbind()) if latent.is_nested else [latent]


def relative_error(ours: Any, reference: Any) -> float:
    """Return the largest difference divided by the largest value; of nested latents, that of the worst."""
    pairs = zip(parts_of(ours), parts_of(reference), strict=True)
    return max(float((found - wanted).abs().max() / wanted.abs().max()) for found, wanted in pairs)
