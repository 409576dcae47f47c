"""A ComfyUI on its own machine gets from several hosts what it gets from one, and goes on when one is lost."""

from pathlib import Path

import pytest

from .backend import Backend
from .comfy import Comfy, prompt
from .conftest import NewNetwork
from .hosts import kill_all
from .run import close

CASES = [
    ("image", "ParallelSampler", "0,0@beta,0@gamma", True),
    ("image", "native nodes", "0,0@beta", True),
    ("video", "ParallelSampler", "0,0@beta", True),
    ("video", "native nodes", "0,0@beta,0@gamma", False),
]


@pytest.mark.newest
def test_workflows_equal_those_of_one_machine(new_network: NewNetwork, comfyui_path: Path, tmp_path: Path) -> None:
    *hosts, desk = new_network("alpha", "beta", "gamma", "desk")
    backend = Backend(hosts=hosts, certificates=tmp_path / "certificates")
    backend.start()
    comfyui = Comfy(backend, desk, comfyui_path, tmp_path)
    for kind, variant, devices, lora in CASES:
        latent, frames = comfyui.run(prompt(kind, variant, "0", lora=lora))
        if lora:
            plain, _ = comfyui.run(prompt(kind, variant, "0", lora=False))
            assert not close(latent, plain), "the LoRA changes something"
        got, drawn = comfyui.run(prompt(kind, variant, devices, lora=lora))
        places = [place.partition("@")[2] for place in devices.split(",")]
        ranks = [rank["host"] for rank in backend.status()["ranks"]]  # those of an earlier request may be more
        assert ranks[: len(places)] == places
        assert close(got, latent), (kind, variant)
        assert (drawn.int() - frames.int()).abs().max() <= 1
        assert frames.float().std() > 5, "the image is blank"


@pytest.mark.newest
def test_a_lost_host_is_done_without_and_used_again(
    new_network: NewNetwork, comfyui_path: Path, tmp_path: Path
) -> None:
    alpha, beta, desk = new_network("alpha", "beta", "desk")
    backend = Backend(hosts=(alpha, beta), certificates=tmp_path / "certificates")
    backend.start()
    comfyui = Comfy(backend, desk, comfyui_path, tmp_path)
    asked = prompt("image", "ParallelSampler", "all", lora=False)
    wanted, _ = comfyui.run(asked)
    for seed, hosts in ((2, [""]), (3, ["", "beta"])):
        if hosts == [""]:
            kill_all(beta)
        else:
            backend.join(beta, 1)
            backend.wait_for(["joined", "joined"])
        asked["5"]["inputs"]["seed"] = seed
        comfyui.run(asked)
        assert sorted({rank["host"] for rank in backend.status()["ranks"]}) == hosts
    asked["5"]["inputs"]["seed"] = 1
    again, _ = comfyui.run(asked)
    assert close(again, wanted)
