"""Checks of a queued prompt. ComfyUI calls them on its event loop, so they run in a thread of their own."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec

from ...parallel_backend.errors import BackendError
from .session import current


class _Thread(ThreadPoolExecutor):
    """A thread of its own, and only one: waiting checks would take all threads with which the event loop serves
    files."""

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
