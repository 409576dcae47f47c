"""The panel's routes on a real server."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest

from parallel_backend.client import query
from parallel_backend.protocol.endpoint import Endpoint
from scripts.comfy_api import ExecutionFailed
from scripts.comfy_events import Events
from scripts.comfy_paths import ROOT
from scripts.comfy_server import ComfyServer
from tests.comfyui.prompts import START, prompt

ROUTES = ("watch", "leave", "start", "stop", "unload", "cancel", "doctor", "report")
CHANGING = ROUTES[2:]


def ask(server: ComfyServer, name: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
    """Send a request to a route, as a POST unless ``name`` is ``status``."""
    data = None if name == "status" else json.dumps({} if body is None else body).encode()
    url = f"{server.client.url}/api/parallel_dit/{name}"
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json", **(headers or {})})
    with urllib.request.urlopen(request, timeout=240) as response:
        return json.loads(response.read())


def refused(server: ComfyServer, name: str, body: Any = None, headers: dict[str, str] | None = None) -> tuple[int, str]:
    """Return status and sentence of a request that is refused."""
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(server, name, body, headers)
    answer = json.loads(caught.value.read())
    return caught.value.code, answer["error"]


def by_command(server: ComfyServer) -> Any:
    """What ``status --json`` prints."""
    command = [sys.executable, "-m", "parallel_backend", "status", "--json"]
    done = subprocess.run(command, cwd=ROOT, env=server.environment(), capture_output=True, check=True, timeout=60)
    return json.loads(done.stdout)


def running_prompts(server: ComfyServer) -> int:
    return len(server.client.get("/queue")["queue_running"])


@contextmanager
def sampling(server: ComfyServer, sampler: str = "KSampler"):
    """A long prompt that samples inside the ``with`` block."""
    with Events(server.client) as events:
        prompt_id = server.client.submit(prompt(sampler, steps=5000, seed=9))
        try:
            events.wait(lambda event: event.kind == "progress" and event.data["value"] >= 3, START)
            yield prompt_id, events
        finally:
            if running_prompts(server):
                server.client.interrupt()
                with pytest.raises(ExecutionFailed, match="interrupted"):
                    server.client.wait(prompt_id, deadline=START)


def test_the_buttons_start_and_stop_the_backend(new_server: Callable[..., ComfyServer]) -> None:
    server = new_server()
    shown = ask(server, "status")
    assert (shown["state"], shown["status"], shown["refused"]) == ("off", None, "")
    ask(server, "start")
    assert ask(server, "status")["state"] == "idle"
    assert query.status(Endpoint(folder=server.runtime)).state == "idle"
    ask(server, "stop")
    assert ask(server, "status")["state"] == "off"
    ask(server, "stop")
    ask(server, "unload")
    ask(server, "cancel")
    assert ask(server, "status")["state"] == "off"


@pytest.mark.parametrize("sampler", ["KSampler", "ParallelSampler"])
@pytest.mark.daily(1)
def test_what_is_pushed_while_sampling_is_the_true_state(tiny_server: ComfyServer, sampler: str) -> None:
    client = tiny_server.client
    with sampling(tiny_server, sampler) as (prompt_id, events):
        ask(tiny_server, "watch", {"client_id": client.client_id})
        ours = [
            event.data
            for event in (events.wait(_pushed, 20), events.wait(lambda each: _pushed(each) and _two(each), 20))
        ]
        wanted = by_command(tiny_server)
        shown = ours[-1]["status"]
        for name in ("pid", "generation", "state", "layout", "approximation", "queued"):
            assert shown[name] == wanted[name]
        origin = {"prompt": prompt_id, "node": _sampler_of(sampler)}
        assert wanted["work"]["origin"] == shown["work"]["origin"] == ours[-1]["steps"]["origin"] == origin
        assert [rank["pid"] for rank in shown["ranks"]] == [rank["pid"] for rank in wanted["ranks"]]
        assert all(rank["device_total"] > rank["device_used"] > 0 for rank in wanted["ranks"])
        assert all(0 <= rank["load"] <= 1 for rank in wanted["ranks"])
        assert ours[-1]["steps"]["total"] == 5000
        assert ours[-1]["steps"]["left"] > 0
        ask(tiny_server, "leave", {"client_id": client.client_id})
        time.sleep(3)  # for what is on its way
        before = len([event for event in events.seen if _pushed(event)])
        time.sleep(3)
        assert len([event for event in events.seen if _pushed(event)]) == before


def _pushed(event: Any) -> bool:
    return bool(event.kind == "parallel_dit.status")


def _two(event: Any) -> bool:
    """Whether a push comes from a running sampling whose steps have been timed."""
    return bool(event.data["status"] and event.data["status"]["work"] and len(event.data["steps"]["seconds"]) > 1)


def _sampler_of(kind: str) -> str:
    return next(key for key, node in prompt(kind).items() if node["class_type"] == kind)


def test_cancel_ends_the_prompt_and_unload_frees_memory(tiny_server: ComfyServer) -> None:
    endpoint = Endpoint(folder=tiny_server.runtime)
    with sampling(tiny_server) as (prompt_id, _):
        assert refused(tiny_server, "unload") == (
            503,
            "the ranks are at work: cancel that first, or unload when it is done",
        )
        ask(tiny_server, "cancel")
        with pytest.raises(ExecutionFailed, match="interrupted"):
            tiny_server.client.wait(prompt_id, deadline=START)
    assert [model.parts for model in query.status(endpoint).ranks[0].models]
    ask(tiny_server, "unload")
    end = time.monotonic() + 10
    while any(rank.models for rank in query.status(endpoint).ranks):
        assert time.monotonic() < end
        time.sleep(0.2)
    result = tiny_server.client.run(prompt("KSampler", steps=2, seed=4), deadline=START)
    assert result.files


def test_the_server_answers_while_the_backend_hangs(new_server: Callable[..., ComfyServer]) -> None:
    server = new_server()
    ask(server, "start")
    pid = query.status(Endpoint(folder=server.runtime)).pid
    os.kill(pid, signal.SIGSTOP)
    try:
        status = subprocess.Popen(
            [sys.executable, "-c", f"import urllib.request as u; u.urlopen('{server.client.url}/parallel_dit/status')"]
        )
        time.sleep(0.5)
        for _ in range(10):
            began = time.monotonic()
            server.client.get("/queue")
            assert time.monotonic() - began < 1
        assert status.poll() is None  # it still waits
    finally:
        os.kill(pid, signal.SIGCONT)
    assert status.wait(60) == 0


@pytest.mark.newest
@pytest.mark.long
def test_the_doctor_and_the_report(server: ComfyServer) -> None:
    findings = ask(server, "doctor")["findings"]
    assert {"fine", "slow", "broken", "not here"} >= {finding["verdict"] for finding in findings}
    assert len(findings) > 5
    text = ask(server, "report")["text"]
    assert text.startswith("### Doctor")
    assert "- Python 3" in text
    assert os.path.expanduser("~") + "/" not in text


@pytest.mark.parametrize("name", ["status", *ROUTES])
def test_a_page_of_another_origin_is_refused(server: ComfyServer, name: str) -> None:
    assert "answers only the page" in refused(server, name, headers={"Sec-Fetch-Site": "same-site"})[1]
    for headers in ({"Sec-Fetch-Site": "cross-site"}, {"Origin": "http://evil.example"}):
        with pytest.raises(urllib.error.HTTPError) as caught:  # ComfyUI itself may be the first to refuse
            ask(server, name, headers=headers)
        assert caught.value.code == 403


@pytest.mark.parametrize("body", [[], {"client_id": ""}, {"client_id": "x" * 65}, {"client_id": 5}, {}])
def test_a_watch_without_a_page_is_refused(server: ComfyServer, body: Any) -> None:
    code, sentence = refused(server, "watch", body)
    assert code == 400
    assert "object" in sentence or "must be the page's id" in sentence


@pytest.mark.newest
@pytest.mark.parametrize("several", [False, True])
def test_where_other_machines_reach_it_only_a_user_changes_something(
    new_server: Callable[..., ComfyServer], several: bool
) -> None:
    server = new_server(arguments=["--listen", "0.0.0.0", *(["--multi-user"] if several else [])])
    assert ask(server, "status")["state"] == "off"
    for name in CHANGING:
        code, sentence = refused(server, name, headers={"comfy-user": "nobody"})
        assert code == 403
        assert "only its own users" in sentence
    assert ask(server, "status")["state"] == "off"
    assert "only its own users" in ask(server, "status")["refused"]
    if several:
        user = json.loads(server.client.request("/users", {"username": "Ann"}))
        ask(server, "start", headers={"comfy-user": user})
        assert ask(server, "status", headers={"comfy-user": user})["refused"] == ""
        assert ask(server, "status")["state"] == "idle"
