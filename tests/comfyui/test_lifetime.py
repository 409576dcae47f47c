"""A rank or ComfyUI dies in the middle of a prompt, or ComfyUI restarts."""

import os
import signal
from collections.abc import Callable

import psutil
import pytest

from parallel_backend.client import query
from parallel_backend.protocol.endpoint import Endpoint
from parallel_backend.protocol.status import Status
from scripts import processes
from scripts.comfy_events import Events
from scripts.comfy_server import ComfyServer
from tests.comfyui.helpers import difference, pixels
from tests.comfyui.prompts import START, prompt
from tests.support import tiny

IDLE = 3
LONG = 600
"""Steps of a run that lasts for seconds."""
pytestmark = pytest.mark.newest


def status(server: ComfyServer) -> Status:
    return query.status(Endpoint(folder=server.runtime))


def start_sampling(server: ComfyServer, sampler: str) -> str:
    """Queue a prompt with very many steps, and wait until it samples."""
    with Events(server.client) as events:
        prompt_id = server.client.submit(prompt(sampler, steps=5000, seed=8))
        events.wait(lambda event: event.kind == "progress" and event.data["value"] >= 3, START)
    return prompt_id


@pytest.mark.parametrize(
    ("sampler", "other"),
    [("ParallelSampler", "KSampler"), pytest.param("KSampler", "ParallelSampler", marks=pytest.mark.long)],
)
def test_a_run_goes_on_after_a_rank_is_killed(tiny_server: ComfyServer, sampler: str, other: str) -> None:
    client, seed = tiny_server.client, len(sampler)  # another one for each, since ComfyUI keeps results
    wanted = pixels(client, client.run(prompt(other, steps=LONG, seed=seed), deadline=START))
    with Events(client) as events:
        prompt_id = client.submit(prompt(sampler, steps=LONG, seed=seed))
        events.wait(lambda event: event.kind == "progress" and event.data["value"] >= LONG // 20, START)
        pid = status(tiny_server).ranks[1].pid
        os.kill(pid, signal.SIGKILL)
        result = client.wait(prompt_id, deadline=START)
        said = f"since rank 1 (pid {pid}) was killed by SIGKILL".encode()
        events.wait(lambda event: event.kind == "preview" and said in event.data)  # as texts on nodes are, too
    assert difference(pixels(client, result), wanted) <= 1
    assert status(tiny_server).ranks[1].pid != pid


@pytest.mark.parametrize("sampler", ["KSampler", "ParallelSampler"])
@pytest.mark.long
def test_a_run_goes_on_after_free_is_called(tiny_server: ComfyServer, sampler: str) -> None:
    client, seed = tiny_server.client, 100 + len(sampler)
    wanted = pixels(client, client.run(prompt(seed=seed), deadline=START))
    with Events(client) as events:
        prompt_id = client.submit(prompt(sampler, steps=LONG, seed=seed))
        events.wait(lambda event: event.kind == "progress" and event.data["value"] >= LONG // 20, START)
        client.request("/free", {"unload_models": True, "free_memory": True})
        long = pixels(client, client.wait(prompt_id, deadline=START))
    assert difference(pixels(client, client.run(prompt(seed=seed), deadline=START)), wanted) == 0
    assert difference(long, pixels(client, client.run(prompt(sampler, steps=LONG, seed=seed), deadline=START))) <= 1


def test_ranks_and_weights_outlive_a_restart_of_comfyui(new_server: Callable[..., ComfyServer]) -> None:
    server = new_server()
    tiny.write(server.base / "models" / "diffusers" / "tiny")
    server.client.run(prompt(), deadline=START)
    before = status(server)
    server.end_comfyui()
    server.start()
    server.client.run(prompt(), deadline=START)
    after = status(server)
    assert [rank.pid for rank in after.ranks] == [rank.pid for rank in before.ranks]
    assert [rank.models for rank in after.ranks] == [rank.models for rank in before.ranks]
    assert sum(rank.steps for rank in after.ranks) > sum(rank.steps for rank in before.ranks)


def test_two_comfyuis_at_once_share_the_ranks(tiny_server: ComfyServer, new_server: Callable[..., ComfyServer]) -> None:
    other = new_server(env={processes.RUNTIME: str(tiny_server.runtime)})
    tiny.write(other.base / "models" / "diffusers" / "tiny")
    clients = (tiny_server.client, other.client)
    prompts = [prompt(sampler, steps=60, seed=9) for sampler in ("KSampler", "ParallelSampler")]
    prompts[1]["2"]["inputs"]["text"] = "a blue square"
    submitted = [client.submit(each) for client, each in zip(clients, prompts, strict=True)]
    together = [
        pixels(client, client.wait(each, deadline=START)) for client, each in zip(clients, submitted, strict=True)
    ]
    alone = [
        pixels(client, client.run(each, deadline=START)) for client, each in zip(clients[::-1], prompts, strict=True)
    ]
    assert [difference(*pair) for pair in zip(together, alone, strict=True)] == [0, 0]
    assert difference(*together) > 1
    assert not processes.processes_of(other.runtime)


def test_no_process_is_left_after_comfyui_is_killed(new_server: Callable[..., ComfyServer]) -> None:
    server = new_server(env={"PARALLEL_DIT_IDLE_TIMEOUT": str(IDLE)})
    tiny.write(server.base / "models" / "diffusers" / "tiny")
    start_sampling(server, "KSampler")
    psutil.Process(server.pid).kill()
    left = processes.wait_for_exit(server.runtime, IDLE + 30.0)
    assert not left, processes.describe(left)
