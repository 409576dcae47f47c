"""Notices what a look at an object must not do: reach the backend, or open a file, a socket, a process or a thread."""

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
EVENTS = ("open", "os.listdir", "os.scandir", "socket.connect", "subprocess.Popen", "os.posix_spawn", "os.fork")
PATIENCE = 120.0
"""Seconds for all looks at one object."""

_watching: dict[int, list[str]] = {}
"""What threads that are watched have done, by thread."""


class SilentClient:
    """A client that must not be asked anything. ``remote`` alone is known without the backend."""

    remote = False

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"the backend is asked for {name}")


def watched(look: Callable[[], T]) -> T:
    """Call a function in a thread of its own, as ComfyUI's server and cache look at a prompt's objects.

    Raises:
        AssertionError: it did one of ``EVENTS``, or started a thread.
        TimeoutError: it waits.
    """
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result(PATIENCE)
        threads = set(threading.enumerate())
        result, done = pool.submit(_noted, look).result(PATIENCE)
        assert not done, done
        assert threads.issuperset(threading.enumerate())  # one of an earlier session may end
        return result


def _noted(look: Callable[[], T]) -> tuple[T, list[str]]:
    with _noting() as done:
        return look(), done


@contextmanager
def _noting() -> Iterator[list[str]]:
    _install()
    done = _watching.setdefault(threading.get_ident(), [])
    try:
        yield done
    finally:
        del _watching[threading.get_ident()]


def _install() -> None:
    if not _installed:
        _installed.append(True)
        sys.addaudithook(_hook)  # which cannot be taken back


_installed: list[bool] = []


def _hook(event: str, args: Any) -> None:
    if event in EVENTS and threading.get_ident() in _watching and not _is_import(args):
        _watching[threading.get_ident()].append(f"{event} {args!r}"[:200])


def _is_import(args: Any) -> bool:
    """Whether Python reads its own modules: torch imports some of its own late."""
    return isinstance(args[0], str) and Path(args[0]).suffix in (".py", ".pyc")
