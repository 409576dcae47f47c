"""ComfyUI's own models leave the ranks' GPUs when weights are about to load there, and stay for every other use."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.model_patcher
import pytest
import torch
from any_folder_name.nodes.backend import memory
from any_folder_name.parallel_backend.layout.parallel_layout import ParallelLayout
from any_folder_name.parallel_backend.protocol.messages import Devices
from helpers.inside_fixtures import Loaded, empty_latent, ksampler, parallel_sampler

# To ComfyUI it is another device than torch.device("cpu"), on which it frees nothing; and it is just as usable.
SHARED, OTHER = torch.device("cpu", 0), torch.device("cpu", 1)


def stand_in(devices: Devices, ranks: int) -> list[torch.device]:
    """The device that the ranks have in common with ComfyUI."""
    return [SHARED]


class Theirs:
    """A model of ComfyUI's on a device; ``stays`` enters it and says whether it is still there after a use."""

    def __init__(self, device: torch.device) -> None:
        linear = torch.nn.Linear(64, 64)
        self.patcher = comfy.model_patcher.ModelPatcher(linear, load_device=device, offload_device=torch.device("cpu"))

    def stays(self, use: Callable[[], Any]) -> bool:
        comfy.model_management.load_models_gpu([self.patcher])
        use()
        return any(entry.model is self.patcher for entry in comfy.model_management.current_loaded_models)


@pytest.fixture(autouse=True)
def nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """ComfyUI's list of models is this test's own."""
    monkeypatch.setattr(comfy.model_management, "current_loaded_models", [])


def until_known(loaded: Loaded, component: str, ranks: int) -> None:
    """Wait until the ranks' status tells of a component."""
    handle, deadline = loaded.model.model.diffusion_model.handle, time.monotonic() + 10.0
    while not handle.holds([component], ranks=ranks):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_models_leave_once_for_each_part_that_loads(
    models: Path, load_remote: Callable[..., Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "gpus", stand_in)
    shutil.copytree(models / "tiny", models / "room")
    loaded, theirs, latent = load_remote(ParallelLayout(ulysses=2), name="room"), Theirs(SHARED), empty_latent()
    tokens = loaded.clip.tokenize("a red circle")
    uses: dict[str, Callable[[], Any]] = {
        "text_encoder": lambda: loaded.clip.encode_from_tokens(tokens),
        "transformer": lambda: ksampler(loaded.model, latent, steps=1),
        "vae": lambda: loaded.vae.decode(latent["samples"]),
    }
    for component, use in uses.items():
        assert not theirs.stays(use), component
        assert any(loaded.model.is_clone(entry.model) for entry in comfy.model_management.current_loaded_models)
        until_known(loaded, component, 1 if component == "text_encoder" else 2)
    for use in (*uses.values(), lambda: parallel_sampler(loaded.model, latent, steps=1)):
        assert theirs.stays(use)


def test_models_elsewhere_stay(load: Callable[..., Loaded], monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load()
    assert Theirs(SHARED).stays(lambda: ksampler(loaded.model, empty_latent(), steps=1)), "the ranks are on the CPU"
    monkeypatch.setattr(memory, "gpus", stand_in)
    assert Theirs(OTHER).stays(lambda: ksampler(loaded.model, empty_latent(), steps=1))


def test_gpus_have_the_numbers_of_this_process() -> None:
    two = Devices(kind="cuda", indices=(3, 1), visible="0,2,4,6")
    assert memory.gpus(two, 2) == [torch.device("cuda", 3), torch.device("cuda", 1)]
    assert memory.gpus(two, 1) == [torch.device("cuda", 3)]
    assert memory.gpus(Devices(kind="cpu", indices=(0, 1)), 2) == []
