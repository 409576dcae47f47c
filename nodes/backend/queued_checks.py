"""Checks of a queued prompt, which ComfyUI calls on its event loop: its whole server would wait for them."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec

from ...parallel_backend.errors import BackendError
from .session import current


class _Thread(ThreadPoolExecutor):
    """Our own, and only one: waiting checks would take all of the event loop's threads, with which it serves files."""

    def __init__(self) -> None:
        super().__init__(1, thread_name_prefix="parallel-dit-check")


Arguments = ParamSpec("Arguments")


async def refusal_by(
    check: Callable[Arguments, object], *args: Arguments.args, **kwargs: Arguments.kwargs
) -> bool | str:
    """Run a check in a thread. Return its refusal in one sentence, or True."""
    try:
        await asyncio.wrap_future(current().part(_Thread).submit(check, *args, **kwargs))
    except BackendError as error:
        return str(error)
    return True
