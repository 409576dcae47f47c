"""A backend that does not answer: ComfyUI's server goes on answering while it checks a prompt."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from parallel_backend.client import query
from parallel_backend.client.client import HOSTS_TIMEOUT
from parallel_backend.protocol.endpoint import Endpoint
from scripts.comfy_api import Prompt
from scripts.comfy_server import ComfyServer
from tests.comfyui.helpers import difference, pixels
from tests.comfyui.prompts import START, prompt
from tests.support import tiny

SOON = HOSTS_TIMEOUT / 2
"""Seconds in which a busy machine's server answers, unless it waits for the backend."""


@contextmanager
def suspended(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def slowest_answer(server: ComfyServer, until: Future[str]) -> float:
    """Return the seconds that the server took at most for an answer while something is under way."""
    slowest = 0.0
    while not until.done():
        before = time.monotonic()
        server.client.get("/queue")
        slowest = max(slowest, time.monotonic() - before)
        time.sleep(0.05)
    return slowest


def three_loaders() -> Prompt:
    """Return a prompt with three nodes that ask the backend when they are queued."""
    nodes = prompt(seed=11)
    for node_id, reader, name, output in (("8", "2", "clip", 1), ("9", "6", "vae", 2)):
        nodes[node_id] = nodes["1"]
        nodes[reader]["inputs"][name] = [node_id, output]
    return nodes


@pytest.mark.newest
@pytest.mark.parametrize("of_several_machines", [False, True])
@pytest.mark.daily(1)
def test_the_server_answers_while_a_backend_is_suspended(
    new_server: Callable[..., ComfyServer], of_several_machines: bool
) -> None:
    """Only a backend of several machines is asked where its devices are, once a prompt."""

    def prepare(base: Path) -> None:
        tiny.write(base / "models" / "diffusers" / "tiny")

    server = new_server(prepare)
    endpoint = Endpoint(folder=server.runtime)
    wanted = pixels(server.client, server.client.run(prompt(seed=11), deadline=START))
    if of_several_machines:
        endpoint.by_hand.touch()
    with suspended(query.status(endpoint).pid), ThreadPoolExecutor(1) as pool:
        before = time.monotonic()
        queued = pool.submit(server.client.submit, three_loaders())
        slowest = slowest_answer(server, queued)
        took = time.monotonic() - before
    endpoint.by_hand.unlink(missing_ok=True)
    assert slowest < SOON
    assert HOSTS_TIMEOUT <= took < 2 * HOSTS_TIMEOUT if of_several_machines else took < HOSTS_TIMEOUT
    assert difference(pixels(server.client, server.client.wait(queued.result(), deadline=START)), wanted) == 0
