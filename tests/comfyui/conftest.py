"""Real ComfyUI servers for the tests. Each version's server starts once and must leave no process behind."""

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from scripts.comfy_api import ComfyClient
from scripts.comfy_server import ComfyServer
from tests.support import tiny


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder ``comfyui``."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.comfyui)


@pytest.fixture(scope="session")
def server(comfyui_path: Path) -> Iterator[ComfyServer]:
    """A running ComfyUI with the extension, shared by the tests of one version. A process left behind is a failure."""
    previews = ["--preview-method", "latent2rgb"]
    server = ComfyServer(comfyui_path, arguments=previews, env={"PARALLEL_DIT_CPU_RANKS": "3"})
    try:
        yield server.start()
    finally:
        log = server.log_text()
        left = server.stop()
    if left:
        sys.stderr.write(log[-3000:])
        pytest.fail(f"processes were left after stop: {left}")


@pytest.fixture
def client(server: ComfyServer) -> ComfyClient:
    """The API of the shared server."""
    return server.client


@pytest.fixture
def new_server(comfyui_path: Path) -> Iterator[Callable[..., ComfyServer]]:
    """``new_server(env={"PARALLEL_DIT_IDLE_TIMEOUT": "3"})`` starts another server with these options.

    ``prepare`` gets its base folder before it starts.
    """
    started: list[ComfyServer] = []

    def start(prepare: Callable[[Path], None] = lambda base: None, **options: object) -> ComfyServer:
        server = ComfyServer(comfyui_path, **options)  # type: ignore[arg-type]
        started.append(server)
        prepare(server.base)
        return server.start()

    yield start
    left = [line for server in started for line in server.stop()]
    assert not left, f"processes were left after stop: {left}"


@pytest.fixture(scope="session")
def tiny_server(server: ComfyServer) -> ComfyServer:
    """The shared server with checkpoints, invalid folders and unusable latents."""
    models = server.base / "models" / "diffusers"
    tiny.write(models / "tiny")
    for name in ("fresh", "fresh too"):
        tiny.write(models / name)
    tiny.write(models / "no vae", tiny.Tiny(vae=False))
    (models / "empty").mkdir()
    (models / "unet").mkdir()
    (models / "unet" / "model_index.json").write_text(json.dumps({"unet": ["diffusers", "UNet2DConditionModel"]}))
    (server.base / "input").mkdir(exist_ok=True)
    for name, latent in (("four", torch.ones(1, 4, 1, 8, 8)), ("nan", torch.full((1, 16, 1, 8, 8), torch.nan))):
        file = server.base / "input" / f"{name}.latent"
        save_file({"latent_tensor": latent, "latent_format_version_0": torch.tensor([])}, file)
    return server
