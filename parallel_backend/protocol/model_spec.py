"""What a request says about a model: which one, in which dtype, on which devices, and what is changed in it."""

from dataclasses import dataclass, replace
from typing import Literal

from ..layout.parallel_layout import ParallelLayout

DType = Literal["auto", "float32", "bfloat16", "float16"]
Collectives = Literal["nccl", "gloo"]

VISIBLE = (
    "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL",
)  # fmt: skip
"""The variables that say which GPUs a process sees, and in which order: CUDA's and ROCm's."""


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The devices that the ranks run on.

    Attributes:
        kind: ``cuda`` or ``cpu``.
        indices: one GPU index for each rank; on the CPU they only count the ranks.
        visible: name and value of those of the variables ``VISIBLE`` that are set where the indices come from.
        collectives: the communication backend of GPU ranks; CPU ranks always use gloo.
    """

    kind: Literal["cuda", "cpu"]
    indices: tuple[int, ...]
    visible: tuple[tuple[str, str], ...] = ()
    collectives: Collectives = "nccl"

    def of_rank(self, rank: int) -> str:
        """PyTorch's name of a rank's device."""
        return "cpu" if self.kind == "cpu" else f"cuda:{self.indices[rank]}"

    def first(self, ranks: int) -> "Devices":
        """The devices of the first ranks."""
        return replace(self, indices=self.indices[:ranks])

    def __str__(self) -> str:
        unit = "GPU" if self.kind == "cuda" else "CPU rank"
        return f"{len(self.indices)} {unit}{'s' if len(self.indices) > 1 else ''}"


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Everything that identifies a loaded model. It serves as the handle: a backend that lost the model reloads it.

    Attributes:
        path: the checkpoint's folder.
        stamp: ``Checkpoint.stamp``, which changes with the files in the folder.
        dtype: of the weights and the computation; ``auto`` lets the loader choose.
        devices: those of the ranks.
        layout: None means ``auto``. Layouts that keep weights whole share the loaded weights.
        attention: a name in ``kernels.KERNELS``, or ``auto``.
    """

    path: str
    stamp: str = ""
    dtype: DType = "auto"
    devices: Devices
    layout: ParallelLayout | None = None
    attention: str = "auto"


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """A LoRA (https://arxiv.org/abs/2106.09685) that a request applies to the model. The weights stay as they are.

    Attributes:
        path: the file with its factors, see ``checkpoint.adapter_file``. Ranks read it at the first use.
        id: hash of its content. Ranks that have read a file with this id do not read it again.
        strength: the factor of what it adds.
    """

    path: str
    id: str
    strength: float


@dataclass(frozen=True, kw_only=True)
class Overlay:
    """Weights that a request uses instead of those in the model's files.

    Attributes:
        path: the file that holds them, see ``checkpoint.overlay_file``.
        id: hash of its content.
    """

    path: str
    id: str
