"""What the panel's buttons do. Each blocks, so that routes run it in a thread, and raises ``BackendError``."""

from collections.abc import Callable, Mapping
from typing import get_args

import comfy.model_management
from typing_extensions import assert_never

from ...parallel_backend import env
from ...parallel_backend.client import query
from ...parallel_backend.client.gpus import visible
from ...parallel_backend.errors import BackendFailure, BackendUnavailable
from ...parallel_backend.protocol.messages import Cancel, Done
from ...parallel_backend.protocol.model_spec import Devices, DType, ModelSpec
from ...parallel_backend.protocol.status import LoadedModel, RankStatus, Status
from ..backend.session import current


def start() -> None:
    """Start the backend unless it runs."""
    current().client.start()


def stop() -> None:
    """Stop the backend and its ranks. Does nothing if none runs."""
    try:
        current().client.stop()
    except BackendUnavailable:
        if current().client.remote:
            raise


def unload() -> None:
    """Free the weights of all models on all ranks.

    Raises:
        BackendFailure: a prompt runs, or the ranks cannot free them.
    """
    session = current()
    try:
        status = session.client.status()
    except BackendUnavailable:
        return
    if status.running or status.queued:
        raise BackendFailure("the ranks are at work: cancel that first, or unload when it is done")
    for spec in loaded(status):
        match session.unload(spec):
            case "freed":
                pass
            case "busy":
                raise BackendFailure("the ranks are at work: unload when that is done")
            case "failed":
                raise BackendFailure("the ranks could not free the weights: see ComfyUI's log, or stop the backend")
            case other:
                assert_never(other)


def cancel() -> None:
    """Cancel what runs: ComfyUI's prompt, and the backend's request, which may be another client's."""
    try:
        status = current().client.status()
    except BackendUnavailable:
        status = None
    comfy.model_management.interrupt_current_processing()
    if status and status.running:
        query.ask(current().client.endpoint, Cancel(request_id=status.running), Done)


def loaded(status: Status) -> list[ModelSpec]:
    """Return the models that ranks hold, in each dtype by which requests may name them."""
    devices, models = _devices(status.ranks), dict[tuple[str, str, str], ModelSpec]()
    for rank in status.ranks:
        for model in rank.models:
            models |= {(spec.path, spec.stamp, spec.dtype): spec for spec in _specs(model, devices)}
    return list(models.values())


def _specs(model: LoadedModel, devices: Devices) -> list[ModelSpec]:
    dtypes = [dtype for dtype in get_args(DType) if dtype in ("auto", model.dtype)]
    return [ModelSpec(path=model.path, stamp=model.stamp, dtype=dtype, devices=devices) for dtype in dtypes]


def _devices(ranks: tuple[RankStatus, ...]) -> Devices:
    """Return the devices of ranks."""
    names = [rank.device.partition(":") for rank in ranks]
    cuda = any(name == "cuda" for name, _, _ in names)
    return Devices(
        kind="cuda" if cuda else "cpu",
        indices=tuple(int(index or number) for number, (_, _, index) in enumerate(names)),
        visible=visible() if cuda else (),
        collectives=env.COLLECTIVES.get() if cuda else "nccl",
        hosts=tuple(rank.host for rank in ranks) if any(rank.host for rank in ranks) else (),
    )


ACTIONS: Mapping[str, Callable[[], None]] = {"start": start, "stop": stop, "unload": unload, "cancel": cancel}
"""By the name of the route."""
