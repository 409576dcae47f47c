"""With one machine, no process imports what only several machines need."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from parallel_backend.client import launch, query
from parallel_backend.protocol.endpoint import Endpoint
from scripts.comfy_paths import ROOT
from scripts.processes import wait_until
from tests.support import closed_room, tiny

PROMPT = """
import sys
from pathlib import Path
from parallel_backend.client.client import Client
from parallel_backend.client.devices import devices_of
from tests.ranks import requests
from tests.ranks.requests import Case

client, model = Client(), Path(sys.argv[1])
assert devices_of(client, "0,1").indices == (0, 1)
for layout in ("ulysses=2", None):
    spec = requests.spec(model, layout, ranks=2)
    for message, tensors in (requests.forward(spec, Case()), requests.sample(spec, Case())):
        assert client.call(message, tensors)
"""
PROMPT_OF_NODES = """
import asyncio, os, sys
from types import ModuleType

for name, folder in (("extension", os.getcwd()), ("extension.nodes", os.path.join(os.getcwd(), "nodes"))):
    sys.modules[name] = ModuleType(name)  # not nodes/__init__.py, which needs ComfyUI
    sys.modules[name].__path__ = [folder]

from extension.nodes.backend.devices import parse_devices
from extension.nodes.backend.queued_checks import refusal_by
from extension.nodes.backend.session import current
from extension.parallel_backend.client.retry import RetriedRequest
from extension.parallel_backend.protocol.messages import Forward
from extension.parallel_backend.protocol.model_spec import ModelSpec
from tests.ranks.requests import Case

session, (_, path, devices) = current(), sys.argv
assert asyncio.run(refusal_by(parse_devices, devices)) is True
spec = ModelSpec(path=path, devices=parse_devices(devices))
forward = Forward(model=session.effective(spec), branches=2)
assert RetriedRequest(session.client, forward, Case().forward_inputs(), recovery=session.recovery(print, None)).run()
assert session.unload(spec) == "freed"
"""


@pytest.fixture
def closed(runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of processes that cannot import the room."""
    monkeypatch.setenv("PYTHONPATH", closed_room.python_path(tmp_path))
    monkeypatch.setenv("PARALLEL_DIT_SPARES", "1")
    return launch.environment(Endpoint(folder=runtime)) | {"PYTHONPATH": os.environ["PYTHONPATH"]}


def run(*arguments: str, env: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300, env=env, check=False
    )


def test_a_prompt_needs_nothing_of_other_machines(runtime: Path, tmp_path: Path, closed: dict[str, str]) -> None:
    model = tiny.write(tmp_path / "model")
    prompt = run("-c", PROMPT, str(model), env=closed)
    assert not prompt.returncode, prompt.stderr[-2000:]
    endpoint = Endpoint(folder=runtime)
    wait_until(lambda: any(spare.ready for spare in query.status(endpoint).spares), 120.0, "a spare rank is ready")
    assert not run("-m", "parallel_backend", "status", env=closed).returncode
    status = query.status(endpoint)
    watched = closed_room.watched(tmp_path)
    ranks = [rank.pid for rank in status.ranks] + [spare.pid for spare in status.spares]
    assert len(ranks) == 3
    assert all("parallel_backend.rank" in watched[pid] for pid in ranks)
    assert "parallel_backend serve" in watched[status.pid]
    assert not run("-m", "parallel_backend", "stop", env=closed).returncode


@pytest.mark.long
def test_the_nodes_need_nothing_of_other_machines(tmp_path: Path, closed: dict[str, str]) -> None:
    model = tiny.write(tmp_path / "model")
    prompt = run("-c", PROMPT_OF_NODES, str(model), "0,1", env=closed)
    assert not prompt.returncode, prompt.stderr[-2000:]
    elsewhere = run("-c", PROMPT_OF_NODES, str(model), "0,0@b", env=closed)
    assert closed_room.SENTENCE in elsewhere.stderr
    assert not run("-m", "parallel_backend", "stop", env=closed).returncode


@pytest.mark.parametrize("arguments", [("serve", "--listen", "127.0.0.1:0"), ("host", "--help"), ("status",)])
def test_the_room_is_closed(arguments: tuple[str, ...], closed: dict[str, str]) -> None:
    """What concerns other machines fails there, so the test above would."""
    answer = run("-m", "parallel_backend", *arguments, env=closed | {"PARALLEL_DIT_BACKEND": "10.0.0.1:7400"})
    assert closed_room.SENTENCE in answer.stderr
