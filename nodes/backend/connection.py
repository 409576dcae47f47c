"""The process's client, and what a request means to ComfyUI: interruption, errors and the loader node's text.

The client lives at module level because ComfyUI locks V3 node classes, which therefore cannot hold state.
"""

import logging
import sys
import time
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import comfy.model_management
import comfy.utils
from torch import Tensor

from ...parallel_backend.checkpoint.checkpoint import HIGH_NOISE, LOW_NOISE, Checkpoint
from ...parallel_backend.client.client import Client
from ...parallel_backend.client.lost_devices import LostDevices
from ...parallel_backend.client.recovery import RecoveringCall
from ...parallel_backend.errors import BackendError, BackendUnavailable, Cancelled, OutOfMemory, QueueFull, RankFailed
from ...parallel_backend.layout.parallel_layout import ParallelLayout, auto, sharing
from ...parallel_backend.protocol.messages import (
    Decode,
    Encode,
    EncodeText,
    Forward,
    Progress,
    RankRequest,
    ReadWeights,
    Sample,
    Unload,
)  # fmt: skip
from ...parallel_backend.protocol.model_spec import ModelSpec
from ...parallel_backend.protocol.status import LoadedModel, RankStatus
from . import comfyui_models, memory_ladder
from .held_models import HeldModels
from .progress_text import OnProgress, shown_progress

PHASES: dict[type[RankRequest], str] = {
    Forward: "sampling",
    Sample: "sampling",
    EncodeText: "encoding text",
    Decode: "decoding",
    Encode: "encoding",
    ReadWeights: "reading weights",
}
"""The phase whose progress drives a request's progress bar; the loader's node shows it as the state."""

UNLOAD_PATIENCE = 10.0
"""Seconds that an unload waits for its turn; the ranks may be busy with another client's request."""

_clients: list[Client] = []
_lost_devices = LostDevices()
_shown_texts: dict[str, str] = {}


def client() -> Client:
    """Return the process's client. The first call creates it."""
    if not _clients:
        _clients.append(Client())
    return _clients[0]


def use_client(replacement: Client) -> None:
    """Send all further requests through ``replacement``."""
    _clients[:] = [replacement]


def _unload(spec: ModelSpec, *, only_cache: bool = False) -> Literal["freed", "busy", "failed"]:
    """Make the ranks free a model's weights, if ranks are running. The log says why that failed.

    Never raises an error: ComfyUI's memory management calls this while it does something else. With ``only_cache`` the
    ranks free what they keep for later requests instead.
    """
    deadline = time.monotonic() + UNLOAD_PATIENCE
    try:
        client().status()
        unload = Unload(model=_lost_devices.without(memory_ladder.settled(spec)), only_cache=only_cache)
        client().call(unload, {}, interrupted=lambda: time.monotonic() > deadline)
    except (Cancelled, QueueFull):
        logging.info("Parallel DiT: the ranks are busy; they keep their memory for now")
        return "busy"
    except BackendUnavailable:
        return "freed"
    except BackendError as error:
        logging.warning("Parallel DiT: the ranks could not free memory: %s", error)
        return "freed" if isinstance(error, RankFailed) else "failed"  # dead processes hold no memory
    except Exception:
        logging.exception("Parallel DiT: the ranks could not be asked to free memory")
        return "failed"
    return "freed"


held_models = HeldModels(lambda spec: _unload(spec) != "busy")


def _release(spec: ModelSpec, holder: object) -> None:
    held_models.release(spec, holder)


@dataclass(frozen=True, kw_only=True)
class Handle:
    """A model that the backend holds, or loads at its first use.

    Attributes:
        spec: the model as requests name it.
        checkpoint: the model's folder.
        node_id: the loader's node, whose text shows ranks, layout and state. None shows nothing.
        keeps: what must live as long as the handle, such as a file in memory.
    """

    spec: ModelSpec
    checkpoint: Checkpoint
    node_id: str | None = None
    keeps: object = None

    def __deepcopy__(self, memo: object) -> "Handle":
        return self

    def keep_weights(self) -> None:
        """Keep the model's weights on the ranks as long as this handle lives, and free them soon after.

        Devices that were lost are tried again, and so is the layout that had too little room.
        """
        _lost_devices.forget()
        memory_ladder.forget(self.spec)
        holder = object()
        held_models.hold(self.spec, holder)
        weakref.finalize(self, _release, self.spec, holder).atexit = False

    @property
    def current(self) -> ModelSpec:
        """The model as its requests run: without devices that are lost, and in a layout that has had room."""
        return _lost_devices.without(memory_ladder.settled(self.spec))

    @property
    def ranks(self) -> int:
        """The number of ranks that the model may use."""
        spec = self.current
        return spec.layout.ranks if spec.layout else len(spec.devices.indices)

    def holds(self, components: Collection[str], *, ranks: int) -> bool:
        """Whether each of the first ``ranks`` ranks holds these components. The status is at most a second old.

        What was loaded from other files under the same path, or cut for another layout, does not count.
        """
        try:
            statuses = client().status().ranks[:ranks]
        except BackendError:
            return False
        return len(statuses) == ranks and all(self._held_by(rank).issuperset(components) for rank in statuses)

    def _held_by(self, rank: RankStatus) -> set[str]:
        """Return this model's components that a rank holds."""
        return {part for model in rank.models for part in self._usable(model)}

    def _usable(self, model: LoadedModel) -> set[str]:
        """Return those components of a loaded model that this model can use."""
        spec = self.current
        if (model.path, model.stamp) != (spec.path, spec.stamp) or spec.dtype not in ("auto", model.dtype):
            return set()
        wanted = [spec.layout.cut] if spec.layout else self._automatic_layouts()
        split = any(layout.splits_weights for layout in (wanted[0], model.layout) if layout)
        return set(model.parts) - ({HIGH_NOISE, LOW_NOISE} if split and model.layout not in wanted else set())

    def _automatic_layouts(self) -> list[ParallelLayout]:
        """Return the layouts that ``auto`` may choose. The first keeps the weights whole."""
        roomy = [auto(self.current.devices.host_sizes, branches=branches) for branches in (1, 2)]
        return [*roomy, *(each for layout in roomy for each in sharing(layout))]

    def layout(self, branches: int) -> ParallelLayout:
        """Return the layout for ``branches`` branches (2 with guidance), with ``auto`` resolved."""
        return self.current.layout or auto(self.current.devices.host_sizes, branches=branches)

    def call(
        self,
        message: RankRequest,
        tensors: Mapping[str, Tensor],
        *,
        on_progress: OnProgress | None = None,
    ) -> dict[str, Tensor]:
        """Make the ranks execute a request. Blocks, and ends early when the user interrupts.

        If ranks fail, the request goes on with a fresh set, see ``RecoveringCall``. If a rank's memory is full,
        ``memory_ladder`` makes room.

        Raises:
            InterruptProcessingException: the user interrupted.
            OOM_EXCEPTION: a rank ran out of memory (ComfyUI's own type, so that its own handling runs).
            BackendError: any other failure, in one sentence.
        """
        phase = PHASES[type(message)]
        self.show(phase)
        held_models.free_dropped()
        progressed = shown_progress(phase, self.show, on_progress)
        shared = comfyui_models.shared_gpus(self.spec.devices, self.ranks)
        call = RecoveringCall(
            client(), memory_ladder.first_try(message, shared), tensors,
            interrupted=comfy.model_management.processing_interrupted,
            on_progress=progressed, notify=self.tell, lost=_lost_devices,
        )  # fmt: skip
        with self._errors_for_comfyui():
            try:
                return memory_ladder.climb(call, message, shared, self.tell)
            finally:
                if not isinstance(message, Forward | Sample):
                    self.give_back_cache()

    def tell(self, sentence: str) -> None:
        """Show on the node, and log, what is done about a failure."""
        logging.warning("Parallel DiT: %s", sentence)
        self.show(sentence)

    def give_back_cache(self) -> None:
        """Make the ranks return what they keep for later on GPUs that ComfyUI uses, too. Never raises an error.

        After sampling, whatever ran the steps, the MODEL calls it once.
        """
        if comfyui_models.shared_gpus(self.spec.devices, self.ranks):
            _unload(self.spec, only_cache=True)

    @contextmanager
    def _errors_for_comfyui(self) -> Iterator[None]:
        """Show errors on the loader's node and raise them as the types that ComfyUI handles."""
        try:
            yield
        except Cancelled:
            self.show("interrupted")
            comfy.model_management.throw_exception_if_processing_interrupted()
            raise
        except OutOfMemory as error:
            self.show("out of memory")
            raise comfy.model_management.OOM_EXCEPTION(str(error)) from error
        except BackendError as error:
            self.show(f"failed: {error}")
            raise

    def unload(self) -> None:
        """Make running ranks free the weights. Never starts ranks and never raises an error."""
        freed = _unload(self.spec) == "freed"
        self.show("unloaded; weights load at next use" if freed else "the weights could not be freed yet")

    def describe(self, state: str) -> str:
        """Return ranks, layout and state as one line."""
        spec = self.current
        kind = "GPU" if spec.devices.kind == "cuda" else "CPU"
        layout = f"layout {spec.layout}" if spec.layout else f"layout auto (guided: {self.layout(2)})"
        if spec.layout and spec.layout.approximate:
            elsewhere = "one stage at a time" if spec.layout.pipe > 1 else "without it"
            approximation = spec.layout.approximation
            layout += f" ({approximation} in Parallel Sampler, approximate; {elsewhere} in other samplers, exact)"
        elif spec.layout and spec.layout.pipe > 1:
            layout += " (one stage at a time, exact)"
        return f"{self.ranks} {kind} rank{'s' if self.ranks > 1 else ''}, {layout}: {state}"

    def show(self, state: str) -> None:
        """Show ranks, layout and state on the loader's node, if ComfyUI's server runs."""
        if self.node_id is not None:
            show_on_node(self.node_id, self.describe(state))


def show_on_node(node_id: str, text: str) -> None:
    """Show a text on a node, if ComfyUI's server runs and the node does not show it yet. Never raises an error."""
    # A script has no server, and importing the module would half start one.
    server = getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)
    if server is not None and _shown_texts.get(node_id) != text:
        _shown_texts[node_id] = text
        try:
            server.send_progress_text(text, node_id)
        except Exception:
            logging.exception("Parallel DiT: node %s cannot show its text", node_id)


def progress_bar() -> OnProgress:
    """Return a callback that shows a request's progress as the running node's progress bar."""
    bar = comfy.utils.ProgressBar(1)

    def update(progress: Progress, _: dict[str, Tensor]) -> None:
        bar.update_absolute(progress.value, progress.total)

    return update
