"""One client for the process, and what a request means to ComfyUI: interruption, errors, the text on the node.

The client lives at module level because ComfyUI locks V3 node classes: they cannot keep state.
"""

import logging
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import comfy.model_management
import comfy.utils
from torch import Tensor

from ...parallel_backend.checkpoint.checkpoint import Checkpoint
from ...parallel_backend.client.client import Client
from ...parallel_backend.errors import BackendError, BackendUnavailable, Cancelled, OutOfMemory, QueueFull
from ...parallel_backend.layout.parallel_layout import ParallelLayout, auto
from ...parallel_backend.protocol.messages import (
    Decode,
    Encode,
    EncodeText,
    Forward,
    ModelSpec,
    Progress,
    RankRequest,
    RankStatus,
    Sample,
    Unload,
)

OnProgress = Callable[[Progress, dict[str, Tensor]], None]

DOING: dict[type[RankRequest], str] = {
    Forward: "sampling",
    Sample: "sampling",
    EncodeText: "encoding text",
    Decode: "decoding",
    Encode: "encoding",
}
"""What a request does, as the node says it; also the phase of the progress that counts for its progress bar."""

WAITING: dict[str, str] = {
    "queued": "waiting for another request",
    "start": "starting ranks",
    "loading": "loading weights",
}

UNLOAD_PATIENCE = 10.0
"""Seconds that an unload may wait for its turn: the ranks may be busy for somebody else."""

FORGET_AFTER = 5.0
"""Seconds until the weights of a dropped model are freed: a loader that runs again may want them."""

_Key = tuple[str, str, str]
_clients: list[Client] = []
_shown: dict[str, str] = {}
_users: dict[_Key, set[object]] = {}
_dropped: dict[_Key, ModelSpec] = {}


def client() -> Client:
    """The process's client; made at the first call."""
    if not _clients:
        _clients.append(Client())
    return _clients[0]


def use_client(instead: Client) -> None:
    """Talk through another client from now on."""
    _clients[:] = [instead]


def free_dropped() -> None:
    """Have the ranks free the models that no node holds any more. Never raises a ``BackendError``."""
    for key in list(_dropped):
        spec = _dropped.pop(key, None)
        if spec and not _users.get(key) and _unload(spec) == "busy":
            _dropped.setdefault(key, spec)
            _free_dropped_soon()


def _free_dropped_soon() -> None:
    timer = threading.Timer(FORGET_AFTER, free_dropped)
    timer.daemon = True
    timer.start()


def _unload(spec: ModelSpec) -> Literal["freed", "busy", "failed"]:
    """Have the ranks free a model's weights, if there are ranks; why they failed is in the log."""
    until = time.monotonic() + UNLOAD_PATIENCE
    try:
        client().status()
        client().call(Unload(model=spec), {}, interrupted=lambda: time.monotonic() > until)
    except (Cancelled, QueueFull):
        logging.info("Parallel DiT: the ranks are busy and keep their weights for now")
        return "busy"
    except BackendUnavailable:
        return "freed"
    except BackendError as error:
        logging.warning("Parallel DiT: the ranks could not free their weights: %s", error)
        return "failed"
    return "freed"


def _key(spec: ModelSpec) -> _Key:
    return spec.path, spec.stamp, spec.dtype


def _forget(spec: ModelSpec, user: object) -> None:
    # A finalizer may run anywhere, also in the middle of the lines that enter another user.
    key = _key(spec)
    _users[key].discard(user)
    if not _users[key]:
        _dropped[key] = spec
        _free_dropped_soon()


@dataclass(frozen=True, kw_only=True)
class Handle:
    """A model that the backend holds, or will load at its first use.

    ``node_id`` is the loader's node, whose text shows ranks, layout and state.
    """

    spec: ModelSpec
    checkpoint: Checkpoint
    node_id: str | None = None

    def keep_weights(self) -> None:
        """Keep the model's weights on the ranks for as long as this handle lives, and free them soon after."""
        user = object()
        _users.setdefault(_key(self.spec), set()).add(user)
        weakref.finalize(self, _forget, self.spec, user).atexit = False

    @property
    def ranks(self) -> int:
        """Ranks that the model may use."""
        return self.spec.layout.ranks if self.spec.layout else len(self.spec.devices.indices)

    def holds(self, components: Collection[str], *, ranks: int) -> bool:
        """Whether the first so many ranks hold these components of the checkpoint, as of a second ago at most.

        They may hold another part of them than a new layout needs.
        """
        try:
            found = client().status().ranks[:ranks]
        except BackendError:
            return False
        return len(found) == ranks and all(self._on(rank).issuperset(components) for rank in found)

    def _on(self, rank: RankStatus) -> set[str]:
        """The components that a rank holds."""
        spec = self.spec
        same = (model for model in rank.models if model.path == spec.path and spec.dtype in ("auto", model.dtype))
        return {part for model in same for part in model.parts}

    def layout(self, branches: int) -> ParallelLayout:
        """The layout for so many branches (2 with guidance), ``auto`` resolved."""
        return self.spec.layout or auto(self.ranks, branches=branches)

    def call(
        self,
        message: RankRequest,
        tensors: Mapping[str, Tensor],
        *,
        on_progress: OnProgress | None = None,
    ) -> dict[str, Tensor]:
        """Have the ranks carry out a request; blocks, and ends early when the user interrupts.

        Raises:
            InterruptProcessingException: the user interrupted.
            OOM_EXCEPTION: a rank ran out of memory (ComfyUI's own type, so that its own handling runs).
            BackendError: anything else, with one sentence.
        """
        doing = DOING[type(message)]
        self.show(doing)
        free_dropped()
        with self._failures():
            return client().call(
                message,
                dict(tensors),
                interrupted=comfy.model_management.processing_interrupted,
                on_progress=self._reporting(doing, on_progress),
            )

    def _reporting(self, doing: str, on_progress: OnProgress | None) -> OnProgress:
        """Progress onto the loader's node, and what is of the phase that counts to ``on_progress``."""

        def progressed(progress: Progress, extra: dict[str, Tensor]) -> None:
            if progress.phase != doing:
                if progress.phase in WAITING:
                    over = progress.phase == "loading" and progress.value
                    self.show(doing if over else WAITING[progress.phase])
                return
            note = f" ({progress.note})" if progress.note else ""
            self.show(f"{doing} {progress.value}/{progress.total}{note}")
            # An interruption ends the call by itself; the progress bar would raise in the middle of it.
            if on_progress is not None and not comfy.model_management.processing_interrupted():
                on_progress(progress, extra)

        return progressed

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Errors onto the loader's node, and into the types that ComfyUI itself handles."""
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
        """Have the ranks free their weights, if there are ranks; never starts any and never raises a BackendError."""
        freed = _unload(self.spec) == "freed"
        self.show("unloaded; weights load at next use" if freed else "the weights could not be freed yet")

    def describe(self, state: str) -> str:
        """Ranks, layout and state in one line."""
        kind = "GPU" if self.spec.devices.kind == "cuda" else "CPU"
        layout = f"layout {self.spec.layout}" if self.spec.layout else f"layout auto (guided: {self.layout(2)})"
        if self.spec.layout and self.spec.layout.approximate:
            others = "stage after stage" if self.spec.layout.pipe > 1 else "the same"
            layout += f" ({self.spec.layout.approximation} in ParallelSampler, approximate; {others} in others, exact)"
        elif self.spec.layout and self.spec.layout.pipe > 1:
            layout += " (stage after stage, exact)"
        return f"{self.ranks} {kind} rank{'s' if self.ranks > 1 else ''}, {layout}: {state}"

    def show(self, state: str) -> None:
        """Write ranks, layout and state onto the loader's node, if a page could be looking."""
        text = self.describe(state)
        if self.node_id is None or _shown.get(self.node_id) == text:
            return
        # Inside a script there is no server, and importing it would start one half.
        server = getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)
        if server is not None:
            _shown[self.node_id] = text
            server.send_progress_text(text, self.node_id)


def progress_bar() -> OnProgress:
    """Show a request's progress as the running node's own progress bar."""
    bar = comfy.utils.ProgressBar(1)

    def update(progress: Progress, _: dict[str, Tensor]) -> None:
        bar.update_absolute(progress.value, progress.total)

    return update
