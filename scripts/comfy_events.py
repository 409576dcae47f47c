"""What ComfyUI sends over its websocket."""

import asyncio
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import aiohttp

from scripts.comfy_api import ComfyClient


@dataclass(frozen=True)
class Event:
    """One event of ComfyUI's websocket.

    Attributes:
        kind: a JSON event's type, or ``"preview"`` for a binary event.
        data: a JSON event's data, or a binary event's ``bytes``.
        at: ``time.monotonic()`` when it came.
    """

    kind: str
    data: Any
    at: float


class Events:
    """Collects what ComfyUI sends to this client over its websocket while the ``with`` block runs.

    ComfyUI sends the events of a prompt only to the client that queued it.

    Attributes:
        seen: the events so far. The list grows in the background.
    """

    def __init__(self, client: ComfyClient) -> None:
        self.seen: list[Event] = []
        self._url = f"{client.url.replace('http', 'ws', 1)}/ws?clientId={client.client_id}"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._connected = threading.Event()

    def wait(self, wanted: Callable[[Event], bool], deadline: float = 60.0) -> Event:
        """Return the first event that ``wanted`` accepts, and wait for it if needed.

        Raises:
            TimeoutError: no such event came within ``deadline`` seconds.
        """
        end = time.monotonic() + deadline
        while time.monotonic() < end:
            for event in list(self.seen):
                if wanted(event):
                    return event
            time.sleep(0.005)
        raise TimeoutError(f"no such event within {deadline:g} s; seen: {sorted({e.kind for e in self.seen})}")

    def of_kind(self, kind: str) -> list[Event]:
        """Return every event of one kind seen so far."""
        return [event for event in self.seen if event.kind == kind]

    def __enter__(self) -> "Events":
        self._thread.start()
        self._task = asyncio.run_coroutine_threadsafe(self._listen(), self._loop)
        if not self._connected.wait(10):
            raise TimeoutError("ComfyUI's websocket did not open within 10 s")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Close in order: a server that notices the end late would drop the same client's next connection.
        asyncio.run_coroutine_threadsafe(self._socket.close(), self._loop).result(10)
        self._task.result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _listen(self) -> None:
        async with aiohttp.ClientSession() as session, session.ws_connect(self._url, max_msg_size=0) as socket:
            self._socket = socket
            self._connected.set()
            async for message in socket:
                if message.type == aiohttp.WSMsgType.TEXT:
                    content = json.loads(message.data)
                    self.seen.append(Event(content["type"], content["data"], time.monotonic()))
                elif message.type == aiohttp.WSMsgType.BINARY:
                    self.seen.append(Event("preview", message.data, time.monotonic()))
