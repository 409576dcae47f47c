"""A GPU that is none, in this process: what torch says about it, and NCCL's place taken by gloo."""

from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store

from parallel_backend.distributed import collectives

from .generators import StandInGenerator
from .recorder import Recorder
from .streams import Streams
from .tensor import selectable

_BACKEND = "standin_nccl"
_BYTES = 80 << 30
"""Memory of the GPU."""
_CAPABILITY = (9, 0)


class Gpu:
    """The GPU of a rank. While it is entered, torch has it, and the recorder notes what happens on it.

    Attributes:
        recorder: runs the operators.
    """

    def __init__(self, index: int) -> None:
        self.recorder = Recorder(torch.device("cuda", index))
        self._streams = Streams(self.recorder.order)
        self._stack = ExitStack()

    def __enter__(self) -> Recorder:
        self._stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device="cuda") then copies by an operator
        self._stack.callback(
            torch.__future__.set_overwrite_module_params_on_conversion,
            torch.__future__.get_overwrite_module_params_on_conversion(),
        )
        torch.__future__.set_overwrite_module_params_on_conversion(True)  # a parameter cannot become a stand-in
        self._stack.enter_context(selectable())
        for name, function in self._functions().items():
            self._stack.enter_context(mock.patch.object(torch.cuda, name, function))
        self._stack.enter_context(mock.patch.object(torch, "Generator", StandInGenerator))
        for name, noted in (
            ("batch_isend_irecv", self.recorder.batched),
            ("all_to_all_single", self.recorder.all_to_all_single),
        ):
            self._stack.enter_context(mock.patch.object(dist, name, partial(noted, getattr(dist, name))))
        # gloo, in NCCL's place, cannot coalesce. The recorder notes a batch as one operation, too.
        self._stack.enter_context(mock.patch.object(collectives, "_coalesced", collectives._batched))
        self._stack.enter_context(self.recorder)
        return self.recorder

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    def _functions(self) -> dict[str, Callable[..., Any]]:
        """What is in the place of functions of ``torch.cuda``."""
        streams = self._streams
        return {
            "_lazy_init": lambda: None,
            "Event": streams.Event,
            "Stream": streams.Stream,
            "cudart": lambda: SimpleNamespace(cudaHostRegister=_succeed, cudaHostUnregister=_succeed),
            "current_device": lambda: self.recorder.device.index,
            "current_stream": streams.current,
            "empty_cache": lambda: None,
            "get_device_capability": lambda device=None: _CAPABILITY,
            "get_device_name": lambda device=None: "stand-in",
            "get_rng_state": lambda device=None: torch.get_rng_state(),
            "is_available": lambda: True,
            "is_bf16_supported": lambda including_emulation=True: True,
            "is_initialized": lambda: True,
            "max_memory_allocated": lambda device=None: 0,
            "mem_get_info": lambda device=None: (_BYTES, _BYTES),
            "memory_allocated": lambda device=None: 0,
            "memory_reserved": lambda device=None: 0,
            "reset_peak_memory_stats": lambda device=None: None,
            "set_device": lambda device: None,
            "set_rng_state": lambda state, device=None: None,
            "stream": streams.entered,
            "synchronize": streams.synchronize,
        }


def _succeed(*_: Any) -> int:
    return 0


def join() -> None:
    """Make the default group anew, with another backend for the tensors of GPUs.

    The backend is gloo, which gets the CPU tensors of stand-ins, under a name with NCCL's in it.
    """
    if _BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(_BACKEND, ProcessGroupGloo, devices=["cuda"])
    rank, size, store = dist.get_rank(), dist.get_world_size(), _get_default_store()
    dist.destroy_process_group()
    dist.init_process_group(
        f"cpu:gloo,cuda:{_BACKEND}", store=PrefixStore("stand-in", store), rank=rank, world_size=size,
        timeout=timedelta(seconds=60),
    )  # fmt: skip
