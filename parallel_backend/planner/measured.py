"""This machine, as its ranks measure it: from the record of an earlier measurement, or anew."""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from ..attention.kernels import AUTO
from ..client.client import Client
from ..client.devices import parse_devices
from ..client.temporary_backend import temporary_backend
from ..loading.room import memory_limit
from ..protocol.messages import Trial
from ..protocol.model_spec import Devices, ModelSpec
from ..protocol.tensors import NAMES
from . import probe, record
from .hardware.description import Hardware
from .request import Prompt

Say = Callable[[str], None]


def of_this_machine(options: argparse.Namespace, prompt: Prompt) -> Hardware:
    """Return this machine for a prompt, as the options of a command ask for it."""
    devices = parse_devices(options.devices or "all")
    return hardware(devices, prompt, again=options.again, say=lambda text: print(text, file=sys.stderr))


def hardware(devices: Devices, prompt: Prompt, *, again: bool, say: Say, folder: Path | None = None) -> Hardware:
    """Return what has been measured of some devices for a prompt; measure what has not, or does not hold any more.

    Args:
        again: whether to measure in any case.
        say: told why something is measured, in a sentence.
        folder: of the records.

    Returns:
        What has been measured, with no more memory than ``env.MEMORY_LIMIT`` allows.
    """
    facts = record.facts_of(devices)
    path = record.file_of(devices, prompt, folder or record.folder())
    found = record.read(path, facts)
    if found.hardware is not None and not again:
        return limited(found.hardware)
    if found.note:
        say(f"{found.note}: it is measured again")
    with tempfile.TemporaryDirectory(prefix="plan-") as scratch, temporary_backend(Path(scratch)) as client:
        measured = measure(client, devices, prompt, facts.devices)
    if note := record.write(path, facts, measured):
        say(note)
    return limited(measured)


def limited(hardware: Hardware) -> Hardware:
    """Return the machine with no more memory than ``env.MEMORY_LIMIT`` allows a rank."""
    memory = [float(memory_limit(int(each.memory))) for each in hardware.devices]
    return hardware.with_memory(memory, hardware.host_memory)


def measure(client: Client, devices: Devices, prompt: Prompt, names: tuple[str, ...]) -> Hardware:
    """Let the ranks measure themselves for a prompt."""
    asked = probe_request(prompt, devices, names)
    spec = ModelSpec(path=str(Path.cwd()), devices=devices)
    return probe.answered(client.call(Trial(model=spec, name=probe.NAME), probe.asked_by(asked)))


def probe_request(
    prompt: Prompt, devices: Devices, names: tuple[str, ...], attention: str = AUTO
) -> probe.ProbeRequest:
    """Return what asks devices with these names to measure themselves for a prompt, with an attention kernel."""
    sizes = devices.host_sizes
    return probe.ProbeRequest(
        class_name=prompt.model.class_name, config=dict(prompt.model.config), shapes=prompt.shapes,
        dtype=NAMES[prompt.dtype], name=name(devices, names), device_names=names,
        hosts=sizes if len(sizes) > 1 else (), attention=attention,
    )  # fmt: skip


def name(devices: Devices, names: tuple[str, ...]) -> str:
    """Return what a person calls these devices."""
    kinds = ", ".join(f"{names.count(kind)}x {kind}" for kind in dict.fromkeys(names))
    return f"this machine ({kinds})" if devices.kind == "cuda" else f"{len(names)} CPU ranks of this machine"
