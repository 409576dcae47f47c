"""Sample and decode with ranks on several hosts: a program that tests run on a host.

Arguments: the model's folder, the file for the results, devices, the layout or "", the number of steps, the latents'
size as in 1x9x7, and a file or "". It prints a line of JSON for each step, each notice and each end. Once the file is
there, it samples again, with few steps and what it knows of lost devices.
"""

import json
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from parallel_backend.checkpoint.opening import open_checkpoint
from parallel_backend.client.client import Client
from parallel_backend.client.lost_devices import LostDevices
from parallel_backend.client.retry import Recovery, RetriedRequest
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.machines.nodes.devices import devices_of
from parallel_backend.protocol.messages import Progress, Sample
from parallel_backend.protocol.model_spec import ModelSpec

AGAIN = 3
"""Steps of the second time."""


def say(**fields: object) -> None:
    """Print one line."""
    print(json.dumps(fields | {"at": time.monotonic()}), flush=True)


def main(folder: str, results: Path, devices: str, layout: str, steps: int, size: str, again: str) -> None:
    """Sample, and write the latents."""
    client, lost = Client(), LostDevices()
    spec = ModelSpec(
        path=folder, devices=devices_of(client, devices), layout=ParallelLayout.parse(layout) if layout else None,
        content=open_checkpoint(Path(folder)).content(),
    )  # fmt: skip
    shape = (2, 16, *map(int, size.split("x")))
    save_file(sample(client, spec, steps, shape, lost), results)
    if again:
        while not Path(again).exists():
            time.sleep(0.1)
        sample(client, spec, AGAIN, shape, lost)


def sample(
    client: Client, spec: ModelSpec, steps: int, shape: tuple[int, ...], lost: LostDevices
) -> dict[str, torch.Tensor]:
    """Return the latents."""
    torch.manual_seed(0)
    inputs = {"x": torch.randn(*shape), "sigmas": torch.linspace(1, 0, steps + 1)}
    inputs |= {f"{i}.encoder_hidden_states": torch.randn(2, 6 - i, 32) for i in range(2)}

    def progressed(progress: Progress, tensors: dict[str, torch.Tensor]) -> None:
        if progress.phase == "sampling":
            say(step=progress.value, note=progress.note)

    request = RetriedRequest(
        client, Sample(model=spec, branches=2, sampler="euler", cfg=3.0), inputs, on_progress=progressed,
        recovery=Recovery(notify=lambda sentence: say(notice=sentence), lost=lost),
    )  # fmt: skip
    samples = request.run()["samples"]
    say(layout=str(client.status().layout), ranks=[[rank.host, rank.device] for rank in client.status().ranks])
    return {"samples": samples}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]), sys.argv[6], sys.argv[7])
