"""What two ranks of a temporary backend do: exchange data, and compute a forward together."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from ... import env
from ...client import gpus
from ...client.devices import choose_devices
from ...client.launch import ROOT
from ...client.temporary_backend import temporary_backend
from ...layout.parallel_layout import ParallelLayout
from ...protocol.messages import Forward, Trial
from ...protocol.model_spec import Devices, ModelSpec
from ..finding import Finding, Setting

if TYPE_CHECKING:
    from torch import Tensor

SHIPPED = ROOT / "checkpoints" / "shapes"
RANKS = 2
NBYTES = 32 << 20
"""Bytes that each rank sends in an exchange."""
TOLERANCE = 1e-4
"""Largest difference of two ranks' forward from one rank's, relative to its largest value, in float32."""
_ENOUGH = {"cpu": (5e-3, 0.2e9), "gloo": (20e-3, 0.2e9), "nccl": (1e-3, 2e9)}
"""Longest latency in seconds and least bytes per second that are not slow."""
_LATENT = (2, 16, 16)
_TEXT = 12


def exchange(setting: Setting) -> list[Finding]:
    """Latency and bandwidth between two ranks."""
    devices = _devices(setting)
    latency, bandwidth = _measure(Path(setting.folder), devices)
    kind = "cpu" if devices.kind == "cpu" else devices.collectives
    text = f"{latency * 1e3:.2f} ms and {bandwidth / 1e9:.2f} GB/s each way between {_described(devices)}"
    most, least = _ENOUGH[kind]
    if latency <= most and bandwidth >= least:
        return [Finding.fine(text)]
    wanted = f"({most * 1e3:g} ms and {least / 1e9:g} GB/s are usual)"
    advice = "Other programs may use the cores or the links: end them and try again. PipeFusion needs least of them."
    return [Finding.slow(f"{text} {wanted}", advice)]


def forward(setting: Setting) -> list[Finding]:
    """Whether two ranks compute what one computes."""
    devices = _devices(setting)
    error = _difference(Path(setting.folder), devices)
    text = f"two ranks differ from one by {error:.1e} of the largest value, on {_described(devices)}"
    if error <= TOLERANCE:
        return [Finding.fine(text)]
    advice = (
        "Exchanges or a kernel return wrong numbers: try NCCL_P2P_DISABLE=1, and run python -m parallel_backend "
        "verify MODEL."
    )
    return [Finding.broken(text, advice)]


def _devices(setting: Setting) -> Devices:
    """Return the devices that the option names; without it two GPUs, one GPU twice, or two CPU ranks."""
    text = setting.devices
    if text is None and gpus.count() == 1:
        env.COLLECTIVES.set("gloo")  # NCCL refuses two ranks on one GPU
        text = "0,0"
    return choose_devices(text, {"the doctor": RANKS})


def _described(devices: Devices) -> str:
    if devices.kind == "cpu":
        return "two CPU ranks"
    where = " and ".join(map(str, devices.indices))
    return f"ranks on GPU {where} over {devices.collectives}"


def _measure(folder: Path, devices: Devices) -> tuple[float, float]:
    """Return seconds of an exchange of a few bytes, and bytes per second and direction of one of many."""
    with temporary_backend(folder) as client:
        spec = ModelSpec(path=str(folder), devices=devices)
        reply = client.call(Trial(model=spec, name="exchange", amount=NBYTES))
    return float(reply["latency"]), NBYTES / float(reply["seconds"])


def _difference(folder: Path, devices: Devices) -> float:
    """Return the largest difference of two ranks' prediction from one rank's, relative to its largest value."""
    path = _model(folder)
    inputs = _inputs(path)
    with temporary_backend(folder) as client:
        split, whole = (
            client.call(Forward(model=_spec(path, devices, layout), branches=1), inputs)["0"].float()
            for layout in (ParallelLayout(ulysses=RANKS), ParallelLayout())
        )
    return float((split - whole).abs().max() / whole.abs().max())


def _spec(path: Path, devices: Devices, layout: ParallelLayout) -> ModelSpec:
    return ModelSpec(path=str(path), devices=devices, dtype="float32", layout=layout)


def _model(folder: Path) -> Path:
    """Return the shipped checkpoint or, where it is not part of the installation, a random model of its shapes."""
    if SHIPPED.is_dir():
        return SHIPPED
    from ...verify import examples

    name = "WanTransformer3DModel"
    variant = next(variant for class_name, variant in examples.variants() if class_name == name)
    return examples.write_checkpoint(folder / "model", examples.module(name, variant))


def _inputs(path: Path) -> "dict[str, Tensor]":
    """Return seeded inputs for a model of Wan's kind."""
    import torch

    config = json.loads((path / "transformer" / "config.json").read_text(encoding="utf-8"))
    generator = torch.Generator().manual_seed(0)
    return {
        "0.hidden_states": torch.randn(1, config["in_channels"], *_LATENT, generator=generator),
        "0.timestep": torch.tensor([500.0]),
        "0.encoder_hidden_states": torch.randn(1, _TEXT, config["text_dim"], generator=generator),
    }
