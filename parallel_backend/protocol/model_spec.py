"""A request's model: its files, dtype and devices, and the changes to its weights."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ..errors import InvalidRequest
from ..layout.parallel_layout import ParallelLayout

DType = Literal["auto", "float32", "bfloat16", "float16"]
Compile = Literal["off", "blocks"]
Collectives = Literal["nccl", "gloo"]

VISIBLE = (
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL",
)  # fmt: skip
"""The variables that say which GPUs a process sees, and in which order: CUDA's and ROCm's."""

MAX_RANKS = 64
"""Most ranks of one set: each is a process."""
MAX_INDEX = 1023
"""Largest number of a GPU."""
MAX_PATH = 4096
"""Characters of a path (``PATH_MAX`` in limits.h)."""


FIRST = ""
"""The name of the first host, on which the supervisor and the first rank run."""


def check_path(path: str) -> None:
    """Refuse a path that no file can have.

    Raises:
        InvalidRequest: it is too long, or has a NUL character.
    """
    if len(path) > MAX_PATH or "\0" in path:
        raise InvalidRequest(f"path {path!r}: must have at most {MAX_PATH} characters, none of them NUL")


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The devices that the ranks run on.

    Attributes:
        kind: ``cuda`` or ``cpu``.
        indices: one GPU index for each rank; on the CPU they only count the ranks.
        visible: name and value of each variable of ``VISIBLE`` that is set in the client's process.
        collectives: the communication backend of GPU ranks; CPU ranks always use gloo.
        hosts: the name of each rank's host; empty if all ranks are on ``FIRST``. The first rank has to be there.

    Raises:
        InvalidRequest: there are too many indices, an index is invalid, a variable's value has a NUL character, or the
            hosts do not fit.
    """

    kind: Literal["cuda", "cpu"]
    indices: tuple[int, ...]
    visible: tuple[tuple[str, str], ...] = ()
    collectives: Collectives = "nccl"
    hosts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.indices) > MAX_RANKS:
            raise InvalidRequest(f"{len(self.indices)} devices are more than {MAX_RANKS}: name fewer")
        wrong = [index for index in self.indices if not 0 <= index <= MAX_INDEX]
        if wrong:
            raise InvalidRequest(f"device {wrong[0]}: the number of a device is from 0 to {MAX_INDEX}")
        if any("\0" in value for _, value in self.visible):
            raise InvalidRequest("a variable that lists GPUs has a NUL character: leave it out")
        if self.hosts and (len(self.hosts) != len(self.indices) or self.hosts[0]):
            raise InvalidRequest("the devices need one host each, and the first device has to be on the first host")

    def of_rank(self, rank: int) -> str:
        """PyTorch's name of a rank's device."""
        return "cpu" if self.kind == "cpu" else f"cuda:{self.indices[rank]}"

    def host_of(self, rank: int) -> str:
        """The name of a rank's host."""
        return self.hosts[rank] if self.hosts else FIRST

    def on_host(self, host: str) -> int:
        """Number of ranks on a host."""
        return self.hosts.count(host) if self.hosts else len(self.indices) * (host == FIRST)

    @property
    def host_sizes(self) -> tuple[int, ...]:
        """Numbers of adjacent ranks on one host, in the order of the ranks."""
        if not self.hosts:
            return (len(self.indices),)
        return tuple(len(list(ranks)) for _, ranks in itertools.groupby(self.hosts))

    def first(self, ranks: int) -> "Devices":
        """The devices of the first ranks."""
        return self.of_ranks(range(min(ranks, len(self.indices))))

    def of_ranks(self, ranks: Sequence[int]) -> "Devices":
        """The devices of some ranks.

        Raises:
            InvalidRequest: the first of them is not on the first host.
        """
        hosts = tuple(self.host_of(rank) for rank in ranks)
        indices = tuple(self.indices[rank] for rank in ranks)
        return replace(self, indices=indices, hosts=hosts if any(hosts) else ())

    @property
    def listed(self) -> str:
        """The devices by their numbers, as ``devices 0,1``, with the names of other hosts."""
        places = [
            f"{index} of {self.host_of(rank)}" if self.host_of(rank) else str(index)
            for rank, index in enumerate(self.indices)
        ]
        return f"devices {','.join(places)}"

    def __str__(self) -> str:
        unit = "GPU" if self.kind == "cuda" else "CPU rank"
        hosts = len(set(self.hosts))
        where = f" on {hosts} hosts" if hosts > 1 else ""
        return f"{len(self.indices)} {unit}{'s' if len(self.indices) > 1 else ''}{where}"


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Everything that identifies a loaded model. It serves as the handle: a backend that lost the model reloads it.

    Attributes:
        path: the checkpoint's folder.
        stamp: ``Checkpoint.stamp``, which changes with the files in the folder.
        dtype: of the weights and the computation; ``auto`` lets the loader choose.
        devices: the ranks'.
        layout: None means ``auto``. Layouts that keep weights whole share the loaded weights.
        attention: a name in ``kernels.KERNELS``, or ``auto``.
        compile: whether the ranks compile the blocks of the transformer.
        mode: what a plan chooses the layout by, one of ``layout.modes.MODES``, if ``layout`` is None; "" for none.
        content: ``Checkpoint.content``, by which other hosts find their copies; "" where all ranks read the path.

    Raises:
        InvalidRequest: no file can have the path.
    """

    path: str
    stamp: str = ""
    dtype: DType = "auto"
    devices: Devices
    layout: ParallelLayout | None = None
    attention: str = "auto"
    compile: Compile = "off"
    mode: str = ""
    content: str = ""

    def __post_init__(self) -> None:
        check_path(self.path)

    @property
    def identity(self) -> str:
        """Identifies the model, on all hosts alike."""
        return self.content or self.path


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A LoRA (https://arxiv.org/abs/2106.09685) that a request applies to the model. The weights stay as they are.

    Attributes:
        path: the file with its factors, see ``checkpoint.adapter_file``. Ranks read it at the first use.
        id: hash of its content. Ranks that have read a file with this id do not read it again.
        strength: the factor on its change.

    Raises:
        InvalidRequest: no file can have the path.
    """

    path: str
    id: str
    strength: float

    def __post_init__(self) -> None:
        check_path(self.path)


@dataclass(frozen=True, kw_only=True)
class Overlay:
    """Weights that replace the model's in a request.

    Attributes:
        path: the file that holds them, see ``checkpoint.overlay_file``.
        id: hash of its content.

    Raises:
        InvalidRequest: no file can have the path.
    """

    path: str
    id: str

    def __post_init__(self) -> None:
        check_path(self.path)
