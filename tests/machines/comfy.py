"""A real ComfyUI on a host of a test network, and prompts to its API: programs that tests run on the host.

``serve CHECKOUT OUTPUT`` starts it, prints its port, and ends it on SIGTERM. ``run PORT PROMPT`` runs a prompt.
"""

import json
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from scripts import workflows
from scripts.comfy_api import ComfyClient, Prompt
from scripts.comfy_server import ComfyServer
from scripts.processes import wait_until

from .backend import PYTHON, Backend
from .hosts import Host

SECONDS = 300.0
LORA = "changed.safetensors"
"""A LoRA for the shipped checkpoint."""


class Comfy:
    """A ComfyUI on a host.

    Args:
        backend: the backend that its nodes use.
        host: the host.
        checkout: of ComfyUI.
        folder: an empty folder, for what it writes.
    """

    def __init__(self, backend: Backend, host: Host, checkout: Path, folder: Path) -> None:
        self._backend, self._host, self._folder, self._number = backend, host, folder, 0
        self._said = folder / "server.txt"
        program = ["-m", "tests.machines.comfy", "serve", str(checkout), str(folder)]
        host.popen([PYTHON, *program], self._environment(), output=self._said.open("w"))
        wait_until(lambda: "port" in self._said.read_text(), SECONDS, "ComfyUI answers")
        self._port = json.loads(self._said.read_text().splitlines()[-1])["port"]

    def _environment(self) -> dict[str, str]:
        return self._backend.environment(PARALLEL_DIT_BACKEND=self._backend.address)

    def run(self, prompt: Prompt) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a prompt; return its latent and its frames ``[N, H, W, 3]`` in 0 to 255."""
        self._number += 1
        asked = self._folder / f"{self._number}.json"
        asked.write_text(json.dumps(prompt))
        program = ["-m", "tests.machines.comfy", "run", str(self._port), str(asked)]
        done = self._host.run([PYTHON, *program], self._environment(), SECONDS)
        assert done.returncode == 0, done.stdout[-3000:]
        found = load_file(asked.with_suffix(".safetensors"))
        return found["latent"], found["frames"]


def prompt(kind: str, variant: str, devices: str, *, lora: bool, steps: int = 6) -> Prompt:
    """An example workflow with these devices, which also saves its latent; with a LoRA if it is asked for."""
    found = workflows.api(f"Included model, text to {kind} ({variant})")
    found["1"]["inputs"]["devices"] = devices
    found["5"]["inputs"]["steps"] = steps
    found["90"] = {"class_type": "SaveLatent", "inputs": {"samples": ["5", 0], "filename_prefix": "latent"}}
    if lora:
        inputs = {"model": ["1", 0], "lora_name": LORA, "strength_model": 0.8}
        found["91"] = {"class_type": "LoraLoaderModelOnly", "inputs": inputs}
        found["5"]["inputs"]["model"] = ["91", 0]
    return found


def _lora() -> dict[str, torch.Tensor]:
    """Factors for some layers of the shipped checkpoint, by their original names."""
    random = torch.Generator().manual_seed(1)
    factors = {}
    for name in ("blocks.0.self_attn.q", "blocks.1.self_attn.v", "blocks.2.cross_attn.o"):
        factors[f"diffusion_model.{name}.lora_A.weight"] = torch.randn(4, 192, generator=random) / 14
        factors[f"diffusion_model.{name}.lora_B.weight"] = torch.randn(192, 4, generator=random) / 4
    return factors


def serve(checkout: str, output: str) -> None:
    """Run ComfyUI until SIGTERM."""
    server = ComfyServer(Path(checkout), output=Path(output))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with server:
        loras = server.base / "models" / "loras"
        loras.mkdir(parents=True)
        save_file(_lora(), loras / LORA)
        print(json.dumps({"port": server.port}), flush=True)
        signal.pause()


def run(port: str, asked: str) -> None:
    """Run one prompt, and write its latent and frames beside it."""
    from tests.comfyui.helpers import pixels

    client, path = ComfyClient(f"http://127.0.0.1:{port}"), Path(asked)
    result = client.run(json.loads(path.read_text()), deadline=SECONDS)
    [latent] = result.outputs["90"]["latents"]
    saved: dict[str, Any] = load_file(path.parent / latent["subfolder"] / latent["filename"])
    frames = torch.from_numpy(pixels(client, result))
    save_file({"latent": saved["latent_tensor"], "frames": frames}, path.with_suffix(".safetensors"))


if __name__ == "__main__":
    {"serve": serve, "run": run}[sys.argv[1]](*sys.argv[2:])
