"""The machine on which the ranks run, for their own plans: what they measured before, or measure now."""

import logging
from pathlib import Path

import torch

from ..distributed.collectives import all_true, gather_numbers, gather_texts
from ..distributed.mesh import Axis
from ..layout.modes import AUTO
from ..layout.parallel_layout import ParallelLayout
from ..loading.offload_plan import with_slack
from ..loading.parts import DeviceMemory
from ..loading.room import room_on
from ..protocol.model_spec import ModelSpec
from . import probe, record
from .hardware.description import Hardware, parse, text
from .measured import probe_request
from .memory import work_bytes
from .request import Prompt
from .slowdown import Watch

log = logging.getLogger(__name__)

_WHY = "-"
"""What a refusal to measure begins with among the ranks."""
_ENDED = (
    "measuring this machine did not end, so the layout is the one that is taken without a plan, for a day or until {} "
    "is removed"
)
_NO_ROOM = "a device has no room to be measured for this size, so the layout is the one that is taken without a plan"
_APART = "\n"
"""Between names of devices."""


class OwnMachine:
    """What the ranks know of the machine. Rank 0 keeps the records.

    Args:
        folder: of the measurements.
        watch: is told the paces of a new measurement.

    Attributes:
        note: on rank 0, why the machine was measured anew, in a sentence, until it is taken; "" if it was not.
    """

    def __init__(self, folder: Path, watch: Watch) -> None:
        self._folder, self._watch, self.note, self._refused = folder, watch, "", ""

    def take_note(self) -> str:
        """Return ``note``, which is to be said once."""
        note, self.note = self.note, ""
        return note

    def hardware(self, prompt: Prompt, model: ModelSpec, world: Axis, memory: DeviceMemory) -> Hardware | str:
        """Return what has been measured, or measure it, or why that cannot be done. Collective over the world."""
        known = gather_texts(self._known(prompt, model, world.size) if world.index == 0 else "", world)[0]
        if known.startswith(_WHY):
            return known.removeprefix(_WHY)
        if known.startswith("{"):
            return parse(known.encode(), "the measurement of this machine")
        if not all_true(not memory.lacks(_probe_bytes(prompt), world.size), world):
            return "" if model.mode == AUTO else _NO_ROOM
        # If the ranks end now, the next ones do not measure.
        noted = world.index != 0 or self._noted(prompt, model, world.size, None)
        if model.mode == AUTO and not all_true(noted, world):
            return ""
        names = tuple(known.split(_APART))
        asked = probe_request(prompt, model.devices.first(len(names)), names, model.attention)
        measured = probe.measure(asked, world, memory.device)
        self._watch.note(measured.paces)
        if self._refused:
            self.note = f"{self._refused}, so it was measured again"
            log.warning("%s", self.note)
        if world.index == 0:
            self._noted(prompt, model, world.size, measured)
        return measured

    def _known(self, prompt: Prompt, model: ModelSpec, ranks: int) -> str:
        """Return the hardware as JSON, or why it may not be measured, or the names of the devices to measure."""
        devices = model.devices.first(ranks)
        facts = record.facts_of(devices)
        path = record.file_of(devices, prompt, self._folder, model.attention)
        found = record.read(path, facts)
        if found.hardware:
            return text(found.hardware).decode()
        if found.begun:
            return _WHY + _ENDED.format(path)
        self._refused = found.note
        return _APART.join(facts.devices)

    def _noted(self, prompt: Prompt, model: ModelSpec, ranks: int, hardware: Hardware | None) -> bool:
        """Keep what has been measured, or that a measurement begins. Return whether that worked."""
        devices = model.devices.first(ranks)
        path = record.file_of(devices, prompt, self._folder, model.attention)
        if note := record.write(path, record.facts_of(devices), hardware):
            log.warning("%s", note)
        return not note


def with_memory(hardware: Hardware, mine: int, world: Axis) -> Hardware:
    """Return the machine with the memory of each rank. Collective over the world.

    Other programs, a limit and loaded models change it from prompt to prompt, so what was measured once does not hold.
    """
    on_host = room_on(torch.device("cpu"), 0).free
    memory, hosts = zip(*gather_numbers([max(mine, 1), on_host], world), strict=True)
    return hardware.with_memory(memory, float(min(hosts)))


def _probe_bytes(prompt: Prompt) -> int:
    """Return the bytes that a probe takes on a device: blocks of two kinds, all that is not in blocks, and tensors."""
    sizes = prompt.layers(1).sizes
    return sizes.outside + 2 * max(sizes.blocks, default=0) + with_slack(max(work_bytes(prompt, ParallelLayout())))
