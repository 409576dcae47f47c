"""What the nodes remember in ComfyUI's process. A test replaces all of it: ``session.use(Session(client))``.

The session lives at module level because ComfyUI locks V3 node classes, which therefore cannot hold state.
"""

import logging
import time
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from ...parallel_backend.client.client import Client
from ...parallel_backend.client.lost_devices import LostDevices
from ...parallel_backend.client.memory_ladder import FreeMemory, SettledLayouts
from ...parallel_backend.client.retry import Recovery, RetriedRequest
from ...parallel_backend.errors import BackendError, BackendUnavailable, Cancelled, QueueFull, RankFailed
from ...parallel_backend.protocol.messages import Unload
from ...parallel_backend.protocol.model_spec import ModelSpec
from .held_models import HeldModels

UNLOAD_PATIENCE = 10.0
"""Seconds that an unload waits for its turn; the ranks may be busy with another client's request."""

Part = TypeVar("Part")


class Session:
    """The client, what it has learnt about the backend, and what other modules remember.

    Args:
        client: None creates a client of the process's endpoint at the first use.

    Attributes:
        lost: devices to skip.
        layouts: layouts that fitted, by model.
        held: the models that are in use.
    """

    def __init__(self, client: Client | None = None) -> None:
        self._client = client
        self.lost, self.layouts = LostDevices(), SettledLayouts()
        self.held = HeldModels(lambda spec: self.unload(spec) != "busy")
        self._parts: dict[type, Any] = {}

    @property
    def client(self) -> Client:
        """Sends all requests."""
        if self._client is None:
            self._client = Client()
        return self._client

    @client.setter
    def client(self, replacement: Client) -> None:
        self._client = replacement

    def part(self, kind: type[Part]) -> Part:
        """Return what a module remembers: the session's object of the class ``kind``. The first call makes it."""
        found: Part | None = self._parts.get(kind)
        return self._parts.setdefault(kind, kind()) if found is None else found

    def recovery(self, notify: Callable[[str], None], free_memory: FreeMemory | None) -> Recovery:
        """Return how a request recovers from failures."""
        return Recovery(notify=notify, lost=self.lost, layouts=self.layouts, free_memory=free_memory)

    def effective(self, spec: ModelSpec) -> ModelSpec:
        """Return a model as its requests run: without lost devices, in a layout that fitted."""
        return self.lost.without(self.layouts.of(spec))

    def unload(self, spec: ModelSpec, *, only_cache: bool = False) -> Literal["freed", "busy", "failed"]:
        """Make the ranks free a model's weights, if ranks run. A failure goes to the log.

        Never raises an error: ComfyUI's memory management calls this while it does something else. With ``only_cache``
        the ranks free what they keep for later requests instead.
        """
        deadline = time.monotonic() + UNLOAD_PATIENCE
        try:
            self.client.status()
            unload = Unload(model=self.effective(spec), only_cache=only_cache)
            RetriedRequest(self.client, unload, {}, interrupted=lambda: time.monotonic() > deadline).run()
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


_session = [Session()]


def current() -> Session:
    """Return the process's session."""
    return _session[0]


def use(session: Session) -> None:
    """Forget everything, and remember in ``session`` from now on."""
    _session[0] = session
