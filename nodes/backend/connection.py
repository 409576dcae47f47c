"""A model in the backend. Connects its requests to ComfyUI's interruption, errors and the loader node's text."""

import logging
import math
import sys
import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import comfy.model_management
import comfy.utils
from torch import Tensor

from ...parallel_backend.checkpoint.checkpoint import HIGH_NOISE, LOW_NOISE, Checkpoint
from ...parallel_backend.client.retry import RetriedRequest
from ...parallel_backend.errors import BackendError, Cancelled, OutOfMemory
from ...parallel_backend.families.registry import FAMILIES
from ...parallel_backend.layout.choice import auto, sharing
from ...parallel_backend.layout.modes import AUTO
from ...parallel_backend.layout.parallel_layout import ParallelLayout
from ...parallel_backend.protocol.messages import (
    Decode,
    Encode,
    EncodeText,
    Forward,
    Progress,
    RankRequest,
    ReadWeights,
    Sample,
)  # fmt: skip
from ...parallel_backend.protocol.model_spec import ModelSpec
from ...parallel_backend.protocol.status import LoadedModel, RankStatus
from . import comfyui_models
from .noted_steps import (
    executing_origin,
    note_failure,
    note_recovery,
    note_steps,
    noted_plan,
    noted_progress,
    sampling_text,
    time_left,
)
from .progress_text import OnProgress, shown_progress
from .session import current

PHASES: dict[type[RankRequest], str] = {
    Forward: "sampling",
    Sample: "sampling",
    EncodeText: "encoding text",
    Decode: "decoding",
    Encode: "encoding",
    ReadWeights: "reading weights",
}
"""The phase whose progress drives a request's progress bar; the loader's node shows it as the state."""


@dataclass(frozen=True, kw_only=True)
class Handle:
    """A model that the backend holds, or loads at its first use.

    Attributes:
        spec: the model as requests name it.
        checkpoint: the model's folder.
        node_id: the loader's node, whose text shows ranks, layout and state. None shows nothing.
        keeps: an object that must live as long as the handle, such as a file in memory.
    """

    spec: ModelSpec
    checkpoint: Checkpoint
    node_id: str | None = None
    keeps: object = None

    def __deepcopy__(self, memo: object) -> "Handle":
        return self

    def keep_weights(self) -> None:
        """Keep the model's weights on the ranks as long as this handle lives, and free them soon after.

        Lost devices are tried again, and so is the layout that did not fit.
        """
        session, holder = current(), object()
        session.lost.forget()
        session.layouts.forget(self.spec)
        session.held.hold(self.spec, holder)
        weakref.finalize(self, session.held.release, self.spec, holder).atexit = False

    @property
    def current(self) -> ModelSpec:
        """The model as its requests run, see ``Session``."""
        return current().effective(self.spec)

    @property
    def ranks(self) -> int:
        """The number of ranks that the model may use."""
        spec = self.current
        return spec.layout.ranks if spec.layout else len(spec.devices.indices)

    def make_room(self, components: Collection[str], *, ranks: int) -> None:
        """Unload ComfyUI's own models from the GPUs where the first ``ranks`` ranks are about to load ``components``.

        Nothing is unloaded if these ranks already hold the components, or if ComfyUI uses none of their GPUs.
        """
        shared = comfyui_models.shared_gpus(self.spec.devices, ranks)
        if shared and not self.holds(components, ranks=ranks):
            comfyui_models.unload(shared)

    def holds(self, components: Collection[str], *, ranks: int) -> bool:
        """Whether each of the first ``ranks`` ranks holds these components. The status is at most a second old.

        Weights from other files under the same path do not count, nor those that are cut for another layout than the
        model has. A plan may have chosen any.
        """
        try:
            statuses = current().client.status().ranks[:ranks]
        except BackendError:
            return False
        if statuses and self._planned and {HIGH_NOISE, LOW_NOISE} & set(components):  # a plan may leave some idle
            ranks = min(ranks, self._planned_ranks(statuses[0]))
            statuses = statuses[:ranks]
        return len(statuses) == ranks and all(self._held_by(rank).issuperset(components) for rank in statuses)

    @property
    def _planned(self) -> bool:
        """Whether a plan chooses among all layouts. In ``auto``, it chooses among those of whole weights."""
        return self.current.layout is None and self.current.mode not in ("", AUTO)

    def _planned_ranks(self, first: RankStatus) -> int:
        """Return the number of ranks of the layout that is loaded, or of all if none is."""
        layouts = (model.layout for model in first.models if self._usable(model))
        return max((layout.ranks for layout in layouts if layout), default=self.ranks)

    def _held_by(self, rank: RankStatus) -> set[str]:
        """Return this model's components that a rank holds."""
        return {part for model in rank.models for part in self._usable(model)}

    def _usable(self, model: LoadedModel) -> set[str]:
        """Return the components of a loaded model that this model can use."""
        spec = self.current
        if (model.path, model.stamp) != (spec.path, spec.stamp) or spec.dtype not in ("auto", model.dtype):
            return set()
        if self._planned:  # in whatever layout
            return set(model.parts)
        wanted = [spec.layout.cut] if spec.layout else self._automatic_layouts()
        split = any(layout.splits_weights for layout in (wanted[0], model.layout) if layout)
        return set(model.parts) - ({HIGH_NOISE, LOW_NOISE} if split and model.layout not in wanted else set())

    def _automatic_layouts(self) -> list[ParallelLayout]:
        """Return the layouts that ``auto`` may choose, but for others of whole weights. The first is such a one."""
        rows = {0.0, self._rows}  # a few frames may be shared unevenly
        hosts = self.current.devices.host_sizes
        roomy = [auto(hosts, branches=branches, rows=each) for each in rows for branches in (1, 2)]
        return [*roomy, *(each for layout in roomy for each in sharing(layout))]

    def layout(self, branches: int) -> ParallelLayout:
        """Return the layout for ``branches`` branches (2 with guidance), with ``auto`` resolved."""
        return self.current.layout or auto(self.current.devices.host_sizes, branches=branches, rows=self._rows)

    @property
    def _rows(self) -> float:
        """The ``rows`` of ``auto`` for any number of frames."""
        family = FAMILIES.get(self.checkpoint.components.get("transformer", ""))
        return math.inf if family and family.within_frames and self.spec.compile == "off" else 0.0

    def call(
        self,
        message: RankRequest,
        tensors: Mapping[str, Tensor],
        *,
        on_progress: OnProgress | None = None,
    ) -> dict[str, Tensor]:
        """Make the ranks execute a request. Blocks, and ends early when the user interrupts.

        ``client.retry`` says what happens when it fails.

        Raises:
            InterruptProcessingException: the user interrupted.
            OOM_EXCEPTION: a rank ran out of memory (ComfyUI's own type, so that its own handling runs).
            BackendError: any other failure, in one sentence.
        """
        phase, origin = PHASES[type(message)], executing_origin()
        self.show(sampling_text(origin) if isinstance(message, Forward) else phase)
        message = replace(message, origin=origin)
        session, shared = current(), comfyui_models.shared_gpus(self.spec.devices, self.ranks)
        session.held.free_dropped()
        noted, left = noted_progress(origin, phase, on_progress), partial(time_left, origin)
        request = RetriedRequest(
            session.client, message, tensors,
            interrupted=comfy.model_management.processing_interrupted,
            on_progress=noted_plan(message, shown_progress(phase, self.show, noted, left)),
            recovery=session.recovery(self.tell, partial(comfyui_models.unload, shared) if shared else None),
        )  # fmt: skip
        with self._errors_for_comfyui():
            try:
                return request.run()
            finally:
                if isinstance(message, Forward | Sample):
                    note_steps(origin)
                else:
                    self.give_back_cache()

    def end_run(self) -> None:
        """Say that no further step of a sampling follows. Without it the ranks wait for one for a few seconds."""
        current().client.end_run()
        note_steps(executing_origin())

    def tell(self, sentence: str) -> None:
        """Show a recovery from a failure on the node, and log it."""
        logging.warning("Parallel DiT: %s", sentence)
        self.show(sentence)
        note_recovery(executing_origin(), sentence)

    def give_back_cache(self) -> None:
        """Make the ranks free cached memory on GPUs that ComfyUI uses, too. Never raises an error.

        The MODEL calls it once after sampling, with any sampler.
        """
        if comfyui_models.shared_gpus(self.spec.devices, self.ranks):
            current().unload(self.spec, only_cache=True)

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
            note_failure(executing_origin(), error)
            self.show("out of memory")
            raise comfy.model_management.OOM_EXCEPTION(str(error)) from error
        except BackendError as error:
            note_failure(executing_origin(), error)
            self.show(f"failed: {error}")
            raise

    def unload(self) -> None:
        """Make running ranks free the weights. Never starts ranks and never raises an error."""
        freed = current().unload(self.spec) == "freed"
        self.show("unloaded; weights load at next use" if freed else "the weights could not be freed yet")

    def describe(self, state: str) -> str:
        """Return ranks, layout and state as one line."""
        spec = self.current
        kind = "GPU" if spec.devices.kind == "cuda" else "CPU"
        rule = f"layout auto (guided, without a plan: {self.layout(2)})"
        layout = f"layout {spec.layout}" if spec.layout else f"layout by mode {spec.mode}" if self._planned else rule
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


class _ShownTexts(dict[str, str]):
    """Texts that nodes show, by their ids."""


def show_on_node(node_id: str, text: str) -> None:
    """Show a text on a node, if ComfyUI's server runs and the node does not show it yet. Never raises an error."""
    # A script has no server, and importing the module would half start one.
    server = getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)
    shown = current().part(_ShownTexts)
    if server is not None and shown.get(node_id) != text:
        shown[node_id] = text
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
