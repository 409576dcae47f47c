"""A process that imports what ranks need and then waits until the supervisor makes it a rank.

It does nothing that depends on the rank's device, and takes no memory of a GPU.
"""

import importlib
import os
import select
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from .. import processes
from ..errors import InvalidRequest
from ..protocol import rank_control
from ..protocol.model_spec import Collectives

_WAKE = 3_600_000
"""Milliseconds after which a waiting process wakes up and waits again."""


@dataclass(frozen=True, kw_only=True)
class Role:
    """The role of a new rank, beside the environment that launchers set.

    Attributes:
        device: PyTorch's name of its device.
        collectives: the communication backend of GPU ranks.
        store: the descriptor of a listening socket for the store of rank 0.
    """

    device: str
    collectives: Collectives
    store: int | None = None


def imports() -> Iterator[None]:
    """Import what a rank uses from its start to the end of its first request, and yield after each part."""
    # diffusers asks for a GPU when it is imported. With this, torch asks NVML, which takes no memory of a GPU.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    backend = ("..engine.engine", "..distributed.process_group", "..protocol.tensors")
    for name in ("torch", "torch.distributed", *backend, "diffusers", "transformers"):
        importlib.import_module(name, __package__)
        yield
    from .. import vaes
    from ..families import modules
    from ..loading.load import SUPPORTED

    for component, class_of in (
        ("transformer", modules.module_class_of), ("vae", vaes.module_class_of), ("text_encoder", _of_transformers),
    ):  # fmt: skip
        for name in SUPPORTED[component]:
            with suppress(AttributeError, InvalidRequest):  # an older library may lack one
                class_of(name)  # imports it
            yield


def _of_transformers(name: str) -> Any:
    return getattr(importlib.import_module("transformers"), name)  # the module may be replaced when it imports a part


def wait_for_role(control: socket.socket, prepare: Callable[[], Iterator[None]] = imports) -> Role:
    """Import what ranks need, wait for a ``Become`` and obey it.

    An earlier message ends the imports: the rank makes the rest when it needs them.
    The process exits if the supervisor is gone.

    Args:
        control: the control socket.
        prepare: yields after each part of the imports.
    """
    poller = select.poll()
    poller.register(control, select.POLLIN)
    for _ in prepare():
        if poller.poll(0):
            break
    else:
        processes.trim_heap()
        rank_control.send(control, rank_control.Prepared())
    while not poller.poll(_WAKE):
        pass
    try:
        message, descriptors = rank_control.receive(control, rank_control.Become)
    except ConnectionError:
        sys.exit(0)
    return _become(message, *descriptors)


def _become(message: rank_control.Become, log: int, store: int | None = None) -> Role:
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log, stream.fileno())
    os.close(log)
    threads = os.environ.get("OMP_NUM_THREADS")
    os.environ.update(message.environment)
    if os.environ["OMP_NUM_THREADS"] != threads and "torch" in sys.modules:
        import torch

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # torch has read the variable when it was imported
    if "torch._inductor.config" in sys.modules:
        from torch._inductor import config

        config.compile_threads = int(os.environ["TORCHINDUCTOR_COMPILE_THREADS"])  # likewise
    return Role(device=message.device, collectives=message.collectives, store=store)
