"""The routes of the panel, on ComfyUI's own server. Each answers JSON; what blocks runs in a thread."""

import asyncio
import json
import logging
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from ...parallel_backend.errors import BackendError, InvalidRequest
from .actions import ACTIONS
from .devices import found_devices
from .doctor import Doctor
from .guard import refused_change, refused_origin
from .making_parallel import made_parallel
from .settings import change_settings, shown_settings
from .snapshot import snapshot
from .watch import Watchers

PREFIX = "/parallel_dit"
MAX_PAGE = 64
"""Characters of the name of a page."""

Handler = Callable[[web.Request], Awaitable[web.Response]]
Answer = Callable[[web.Request], Awaitable[Any]]


def add_to_server() -> None:
    """Add the routes, if ComfyUI's server runs. A script has none, and importing the module would half start one."""
    server = getattr(getattr(sys.modules.get("server"), "PromptServer", None), "instance", None)
    if server is not None:
        Routes(server).add()


class Routes:
    """The routes of one server.

    Args:
        server: ComfyUI's ``PromptServer``.
    """

    def __init__(self, server: Any) -> None:
        self._server = server
        self._watchers, self._doctor = Watchers(server.send_sync), Doctor()

    def add(self) -> None:
        """Add them to the server."""
        routes = self._server.routes
        routes.get(f"{PREFIX}/status")(self._reading(self._status))
        routes.post(f"{PREFIX}/watch")(self._reading(self._watch))
        routes.post(f"{PREFIX}/leave")(self._reading(self._leave))
        routes.get(f"{PREFIX}/settings")(self._reading(_settings))
        routes.post(f"{PREFIX}/settings")(self._changing(_change_settings))
        routes.get(f"{PREFIX}/devices")(self._reading(_devices))
        routes.post(f"{PREFIX}/make_parallel")(self._reading(_make_parallel))
        for name, act in ACTIONS.items():
            routes.post(f"{PREFIX}/{name}")(self._changing(self._acting(act)))
        routes.post(f"{PREFIX}/doctor")(self._changing(self._examine))
        routes.post(f"{PREFIX}/report")(self._changing(self._report))

    def _reading(self, answer: Answer) -> Handler:
        """Return the handler of a route that changes nothing."""

        async def handle(request: web.Request) -> web.Response:
            refused = refused_origin(request.headers)
            return _refusal(refused) if refused else await _answered(answer, request)

        return handle

    def _changing(self, answer: Answer) -> Handler:
        """Return the handler of a route that changes something, or uses the machine."""

        async def handle(request: web.Request) -> web.Response:
            refused = refused_origin(request.headers) or self._refused_change(request.headers)
            return _refusal(refused) if refused else await _answered(answer, request)

        return handle

    def _refused_change(self, headers: Mapping[str, str]) -> str:
        return refused_change(headers, self._server.user_manager)

    async def _status(self, request: web.Request) -> Any:
        shown = await asyncio.to_thread(snapshot)
        return shown | {"refused": self._refused_change(request.headers)}

    async def _watch(self, request: web.Request) -> Any:
        self._watchers.watch(await _page(request))
        return {"refused": self._refused_change(request.headers)}

    async def _leave(self, request: web.Request) -> Any:
        self._watchers.leave(await _page(request))
        return {}

    def _acting(self, act: Callable[[], None]) -> Answer:
        async def answer(request: web.Request) -> Any:
            try:
                await asyncio.to_thread(act)
            finally:
                self._watchers.hurry()
            return {}

        return answer

    async def _examine(self, request: web.Request) -> Any:
        return {"findings": json.loads(await self._doctor.run("--json"))}

    async def _report(self, request: web.Request) -> Any:
        return {"text": await self._doctor.run("--markdown")}


async def _answered(answer: Answer, request: web.Request) -> web.Response:
    try:
        return web.json_response(await answer(request))
    except InvalidRequest as error:
        return _failure(400, error)
    except BackendError as error:
        return _failure(503, error)
    except Exception as error:
        logging.exception("Parallel DiT: %s failed", request.path)
        return _failure(500, error)


def _failure(status: int, error: Exception) -> web.Response:
    code = getattr(error, "code", "failure")
    return web.json_response({"error": str(error) or type(error).__name__, "code": code}, status=status)


def _refusal(sentence: str) -> web.Response:
    return web.json_response({"error": sentence, "code": "refused"}, status=403)


async def _settings(request: web.Request) -> Any:
    return await asyncio.to_thread(shown_settings)


async def _change_settings(request: web.Request) -> Any:
    return await asyncio.to_thread(change_settings, await body_of(request))


async def _devices(request: web.Request) -> Any:
    return await asyncio.to_thread(found_devices)


async def _make_parallel(request: web.Request) -> Any:
    body = await body_of(request)
    return await asyncio.to_thread(made_parallel, body.get("workflow"))


async def _page(request: web.Request) -> str:
    """Return the page that a request names.

    Raises:
        InvalidRequest: it names none.
    """
    body = await body_of(request)
    page = body.get("client_id")
    if not isinstance(page, str) or not 0 < len(page) <= MAX_PAGE:
        raise InvalidRequest(f"client_id {page!r}: must be the page's id, of 1 to {MAX_PAGE} characters")
    return page


async def body_of(request: web.Request) -> dict[str, Any]:
    """Return the JSON object of a request.

    Raises:
        InvalidRequest: its body is none.
    """
    try:
        body = await request.json()
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{request.path}: the body is no JSON; send an object") from error
    if not isinstance(body, dict):
        raise InvalidRequest(f"{request.path}: the body is a {type(body).__name__}; send an object")
    return body
