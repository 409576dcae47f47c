"""What a probe has measured, kept on disk by devices, model, size and kernel. What is wrong is said, and made anew."""

import hashlib
import os
import platform
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from .. import packages
from ..attention.kernels import AUTO
from ..errors import InvalidRequest
from ..protocol.model_spec import Devices
from ..protocol.private_file import FILE_MODE, FOLDER_MODE
from ..version import version
from .hardware.description import MAX_FILE, Hardware
from .request import Prompt

_FORM = 7
TEXT = 256
"""Tokens up to a multiple of which texts count as equally long."""
_BEGUN = 86400.0
"""Seconds for which a measurement that has begun and not ended is not begun again."""
_CACHES = "XDG_CACHE_HOME"
_APART, _NAME = "-", 24
"""Between what was measured and on which devices, and the characters of each, in a file's name."""
_KERNELS = ("flash_attn_interface", "flash_attn", "sageattention")
"""Modules of packages for attention."""


Tried = dict[str, dict[str, float | None]]
"""Seconds of a step by layout, as text, by kind of request: what was tried in the first steps of a prompt. None stands
for a layout whose first step has not ended."""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a measurement depends on, besides devices, model and size, which name its file.

    Attributes:
        version: of this extension.
        torch: its version, with that of CUDA.
        driver: of the GPUs; the kernel of the machine for CPU ranks.
        devices: names of the devices, by rank.
        kernels: installed packages for attention, which GPUs may use.
    """

    version: str
    torch: str
    driver: str
    devices: tuple[str, ...]
    kernels: tuple[str, ...] = ()


class _Record(msgspec.Struct, frozen=True, kw_only=True):
    form: int
    facts: Facts
    digest: str
    hardware: Hardware | None
    tried: Tried = msgspec.field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Found:
    """What there is on disk.

    Attributes:
        hardware: what was measured; None if nothing holds.
        note: why a record that is there does not hold, in a sentence; "" otherwise.
        begun: whether a measurement began that has not ended.
        tried: what was tried on it.
    """

    hardware: Hardware | None
    note: str = ""
    begun: bool = False
    tried: Tried = field(default_factory=dict)


def folder() -> Path:
    """Return the folder of the records, among the user's caches."""
    caches = os.environ.get(_CACHES, "")
    base = Path(caches) if os.path.isabs(caches) else Path(os.path.expanduser("~")) / ".cache"
    return base / "parallel-dit" / "probes"


def file_of(devices: Devices, prompt: Prompt, folder: Path, attention: str = AUTO) -> Path:
    """Return the file of a measurement on these devices, of this model and size, with an attention kernel."""
    where = devices.kind, devices.indices, devices.hosts, devices.collectives
    named: Mapping[str, Any] = {
        "class": prompt.model.class_name, "config": {name: str(value) for name, value in prompt.model.config.items()},
        "shapes": {name: _rounded(prompt, name) for name in prompt.shapes}, "dtype": str(prompt.dtype),
        "attention": attention,
    }  # fmt: skip
    return folder / f"{_named(named)}{_APART}{_named(where)}.json"


def _named(things: object) -> str:
    return hashlib.sha256(msgspec.json.encode(things, order="sorted")).hexdigest()[:_NAME]


def _rounded(prompt: Prompt, name: str) -> tuple[int, ...]:
    """Return the shape of an input. Texts of about the same length are measured once."""
    shape = tuple(prompt.shapes[name])
    if name in prompt.family.latents or len(shape) < 2:
        return shape
    return shape[0], -(-shape[1] // TEXT) * TEXT, *shape[2:]


def read(path: Path, facts: Facts) -> Found:
    """Return what a file holds, if it holds for these facts."""
    try:
        with path.open("rb") as file:
            data, written = file.read(MAX_FILE + 1), os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return Found(hardware=None, note=_removed(path))
    except OSError as error:
        return Found(hardware=None, note=f"the measurement in {path} cannot be read ({error.strerror})")
    try:
        if len(data) > MAX_FILE:
            raise ValueError("too long")
        record = msgspec.json.decode(data, type=_Record)
    except (msgspec.MsgspecError, ValueError, RecursionError, InvalidRequest):
        return Found(hardware=None, note=f"the measurement in {path} is damaged")
    if record.form != _FORM or record.digest != _digest(record.facts, record.hardware, record.tried):
        return Found(hardware=None, note=f"the measurement in {path} is damaged, or of another version")
    if note := _difference(record.facts, facts):
        return Found(hardware=None, note=f"this machine was measured with {note}")
    if record.hardware is None:
        begun = 0 <= time.time() - written < _BEGUN
        return Found(hardware=None, note="measuring this machine did not end", begun=begun)
    return Found(hardware=record.hardware, tried=record.tried)


def _removed(path: Path) -> str:
    """Return that GPUs of this host are gone with which the same was measured, in a sentence; "" if none is."""
    import torch

    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    others = path.parent.glob(f"{path.name.partition(_APART)[0]}{_APART}*.json") if here else ()
    for other in sorted(others):
        with suppress(OSError, msgspec.MsgspecError, ValueError, RecursionError, InvalidRequest):
            with other.open("rb") as file:
                record = msgspec.json.decode(file.read(MAX_FILE), type=_Record)
            if record.hardware and not record.hardware.hosts and len(record.facts.devices) > here:
                return f"this machine was measured with more devices ({', '.join(record.facts.devices)})"
    return ""


def write(path: Path, facts: Facts, hardware: Hardware | None, tried: Tried | None = None) -> str:
    """Keep a measurement, and what was tried; return why that does not work, or "".

    Without ``hardware``, keep that a measurement begins.
    """
    tried = tried or {}
    digest = _digest(facts, hardware, tried)
    record = _Record(form=_FORM, facts=facts, digest=digest, hardware=hardware, tried=tried)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, FILE_MODE), "wb") as file:
            file.write(msgspec.json.encode(record))
        part.replace(path)
    except OSError as error:
        return f"the measurement cannot be kept in {path}: {error.strerror}"
    return ""


def facts_of(devices: Devices) -> Facts:
    """Return the facts of this machine."""
    import torch

    if devices.kind == "cpu":
        names = (f"{_processor()}, {os.cpu_count()} cores",) * len(devices.indices)
        return Facts(version=version(), torch=str(torch.__version__), driver=platform.release(), devices=names)
    here = torch.cuda.device_count()  # another host may have more
    names = tuple(torch.cuda.get_device_name(each) if each < here else f"GPU {each}" for each in devices.indices)
    kernels = tuple(filter(packages.is_installed, _KERNELS))
    return Facts(version=version(), torch=str(torch.__version__), driver=_driver(), devices=names, kernels=kernels)


def _processor() -> str:
    """Return the processor's name as Linux says it, or its architecture."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name" and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()


def _driver() -> str:
    """Return the driver's version as the kernel module says it; "" without NVIDIA's."""
    try:
        return Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").splitlines()[0].strip()
    except (OSError, IndexError):
        return ""


def _digest(facts: Facts, hardware: Hardware | None, tried: Tried) -> str:
    return hashlib.sha256(msgspec.json.encode([facts, hardware, tried])).hexdigest()


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "none"


def _difference(then: Facts, now: Facts) -> str:
    """Return in which way facts have changed, in words; "" if they have not."""
    changes = (
        ("version {} of this extension, and this is {}", then.version, now.version),
        ("torch {}, and this is {}", then.torch, now.torch),
        ("another driver ({}), and this is {}", then.driver, now.driver),
        ("other devices ({}), and these are {}", ", ".join(then.devices), ", ".join(now.devices)),
        ("other packages for attention ({}), and now there are {}", _listed(then.kernels), _listed(now.kernels)),
    )
    return next((words.format(old, new) for words, old, new in changes if old != new), "")
