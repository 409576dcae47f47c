"""A tensor that computes on the CPU and says that it is on a GPU."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_CUDA, _META = 1, 14
"""Numbers of devices in ``c10/core/DeviceType.h``."""
_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"
"""``c10::impl::device_guard_impl_registry``: by the number of a device, what selects a device of this kind."""


class StandIn(Tensor):
    """Real numbers in the CPU's memory, under the name of a GPU.

    Its ``device``, ``is_cuda`` and dispatch keys are those of the GPU, and its storage is that of ``held``, so that
    views, in-place operators and resized storages behave as on a GPU. A ``Recorder`` runs the operators.

    Attributes:
        held: the same memory as a plain CPU tensor.
        claimed: the GPU.
    """

    held: Tensor
    claimed: torch.device

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: Tensor, device: torch.device) -> "StandIn":
        made: StandIn = torch.Tensor._make_subclass(
            cls, held, False, dispatch_device=True, device_for_backend_keys=device
        )
        made.held, made.claimed = held, device
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The GPU."""
        return self.claimed

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.prim.device.default:
            return args[0].claimed
        raise AssertionError(f"{func} runs on a stand-in tensor outside of a recording")

    def new_tensor(  # type: ignore[override]
        self, data: Any, *, dtype: torch.dtype | None = None, **options: Any
    ) -> Tensor:
        """See ``Tensor.new_tensor``, which asks what selects GPUs for the current one."""
        return torch.tensor(data, dtype=dtype or self.dtype, device=self.claimed, **options)

    def record_stream(self, stream: Any) -> None:
        """See ``Tensor.record_stream``, which takes only streams of CUDA."""

    def tolist(self) -> Any:
        """See ``Tensor.tolist``, which torch refuses for subclasses."""
        return self.cpu().tolist()


@contextmanager
def selectable() -> Iterator[None]:
    """Let torch select a GPU. A build without CUDA has nothing that does it, and refuses to index a GPU's tensors.

    What selects GPUs is what selects the device ``meta``: it does nothing.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    guards = (ctypes.c_void_p * (_META + 1)).in_dll(library, _GUARDS)
    before, guards[_CUDA] = guards[_CUDA], guards[_META]
    try:
        yield
    finally:
        guards[_CUDA] = before
