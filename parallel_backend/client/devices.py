"""Parse the user's choice of devices."""

import re
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from .. import env
from ..errors import InvalidRequest
from ..layout.parallel_layout import ParallelLayout
from ..other_machines import machines
from ..protocol.hosts import HostStatus
from ..protocol.model_spec import Collectives, Devices
from .gpus import count as gpu_count
from .gpus import described, other_accelerator, visible


def parse_devices(text: str) -> Devices:
    """Parse ``"all"``, ``"0,1"`` or ``"cuda:0,cuda:1"``.

    ``PARALLEL_DIT_DEVICES`` says what ``"all"`` means; without it, all GPUs. Without GPUs, ``"all"`` means
    ``PARALLEL_DIT_CPU_RANKS`` ranks on the CPU (2 if unset), and a list of numbers means one CPU rank for each number.
    A machine with other accelerators needs the variable for that.
    With ``PARALLEL_DIT_COLLECTIVES=gloo``, GPU ranks communicate through host memory instead of NCCL. Only then may
    several ranks share one GPU.

    Raises:
        InvalidRequest: a device does not exist, is listed twice, is not a device ranks can run on, or a
            variable has a bad value.
    """
    gpus = gpu_count()
    text = env.DEVICES.get() if text.strip().lower() == "all" else text
    _check_others(text, gpus)
    collectives = env.COLLECTIVES.get()
    if text.strip().lower() == "all":
        return _on_gpus(tuple(range(gpus)), collectives) if gpus else _all_cpu()
    words = [word.strip() for word in text.split(",")]
    indices = tuple(_index(word, text, gpus) for word in words)
    for index in indices:
        if indices.count(index) > 1 and not (gpus and collectives == "gloo"):
            raise InvalidRequest(f"devices {text!r}: {index} is listed twice; name each device once")
        if index >= (gpus or env.MAX_CPU_RANKS):
            raise InvalidRequest(f"devices {text!r}: there is no device {index}; {_valid_choices(gpus)}")
    return _on_gpus(indices, collectives) if gpus else Devices(kind="cpu", indices=indices)


class KnowsHosts(Protocol):
    """The part of a ``Client`` that knows where its ranks run."""

    @property
    def remote(self) -> bool:
        """Whether the backend is on another machine."""

    def hosts(self) -> tuple[HostStatus, ...]:
        """See ``Client``."""


def devices_of(client: KnowsHosts, text: str) -> Devices:
    """Parse a choice of devices for a client's backend.

    Raises:
        InvalidRequest: see ``parse_devices``; or a host is missing.
        BackendError: the backend is on another machine and does not answer.
    """
    if not client.remote and "@" not in text and not client.hosts():
        return parse_devices(text)
    of_several: Callable[[KnowsHosts, str], Devices] = machines("nodes.devices").devices_of
    return of_several(client, text)


def add_option(parser: ArgumentParser) -> None:
    """Add ``--devices`` to a command's parser."""
    parser.add_argument(
        "--devices", metavar="LIST",
        help='devices of the ranks, one for each: "all", "0,1" or "cuda:0,cuda:1" (default: the GPUs if there are any, '
        "otherwise as many CPU ranks as are needed; CUDA_VISIBLE_DEVICES= hides the GPUs)",
    )  # fmt: skip


def choose_devices(text: str | None, needs: Mapping[str, int]) -> Devices:
    """Return the devices of a command's ranks: the first devices in ``--devices``, as many as needed.

    Args:
        text: the option. Without it, all GPUs if there are any, otherwise as many CPU ranks as needed.
        needs: the number of ranks that each user of the devices needs, by its name.

    Raises:
        InvalidRequest: the option cannot be parsed, or names too few devices.
    """
    what = max(needs, key=needs.__getitem__)
    ranks = needs[what]
    if text is None:
        text = "all" if gpu_count() else ",".join(map(str, range(ranks)))
    devices = parse_devices(text)
    if ranks > len(devices.indices):
        remedy = (
            "CUDA_VISIBLE_DEVICES= for CPU ranks, or PARALLEL_DIT_COLLECTIVES=gloo and a GPU listed several times"
            if devices.kind == "cuda"
            else f"--devices {','.join(map(str, range(ranks)))}"
        )
        raise InvalidRequest(f"{what} needs {ranks} ranks and --devices {text!r} means {devices}; {remedy} would work")
    return devices.first(ranks)


def ranks_of(layouts: Iterable[ParallelLayout]) -> dict[str, int]:
    """Return what layouts need, for ``choose_devices``."""
    return {f'layout "{layout}"': layout.ranks for layout in layouts}


def _on_gpus(indices: tuple[int, ...], collectives: Collectives) -> Devices:
    # ComfyUI's --cuda-device renumbers the GPUs for its own process, and one backend may serve several ComfyUIs.
    return Devices(kind="cuda", indices=indices, visible=visible(), collectives=collectives)


def _check_others(text: str, gpus: int) -> None:
    """Refuse devices that ranks cannot use, and CPU ranks beside them that nobody asked for."""
    others = {word.strip().partition(":")[0].lower() for word in text.split(",")}
    named = next(filter(None, map(described, sorted(others))), "")
    if named:
        raise InvalidRequest(f"devices {text!r}: ranks do not run on {named}; {_valid_choices(gpus)}")
    other = "" if gpus or env.CPU_RANKS.is_set() else other_accelerator()
    if other:
        raise InvalidRequest(
            f"devices {text!r}: this machine has {other}, on which ranks do not run; "
            f'{env.CPU_RANKS}={env.CPU_RANKS.default} and "all" would work, for ranks on the CPU'
        )


def _index(word: str, text: str, gpus: int) -> int:
    match = re.fullmatch(r"(cuda:)?([0-9]{1,4})", word)
    if not match:
        raise InvalidRequest(f"devices {text!r}: {word!r} is not a device; {_valid_choices(gpus)}")
    if match[1] and not gpus:
        raise InvalidRequest(f"devices {text!r}: there is no GPU here; {_valid_choices(gpus)}")
    return int(match[2])


def _valid_choices(gpus: int) -> str:
    if gpus:
        names = ",".join(f"cuda:{index}" for index in range(gpus))
        return f'"all" or any of {names} would work'
    return f'"all", or numbers from 0 to {env.MAX_CPU_RANKS - 1} for CPU ranks, such as "0,1", would work'


def _all_cpu() -> Devices:
    return Devices(kind="cpu", indices=tuple(range(env.CPU_RANKS.get())))
