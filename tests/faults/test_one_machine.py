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
from tests.support import tiny

CLOSED = """
import os, runpy, sys
from pathlib import Path

class Closed:
    '''Lets nobody import the room of other machines, and notes which processes it has watched.'''

    def find_spec(self, name, path=None, target=None):
        if name == "parallel_backend.machines":
            raise ImportError("the room of other machines is closed")

Path(__file__).with_name(f"{os.getpid()}.seen").write_text(" ".join(sys.orig_argv))
sys.meta_path.insert(0, Closed())
runpy.run_path(os.environ["CPU_SHIM"], run_name="sitecustomize")
"""
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


@pytest.fixture
def closed(runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment of processes that cannot import the room."""
    (tmp_path / "sitecustomize.py").write_text(CLOSED)
    monkeypatch.setenv("CPU_SHIM", str(ROOT / "scripts" / "cpu_shim" / "sitecustomize.py"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
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
    watched = {int(file.stem): file.read_text() for file in tmp_path.glob("*.seen")}
    ranks = [rank.pid for rank in status.ranks] + [spare.pid for spare in status.spares]
    assert len(ranks) == 3
    assert all("parallel_backend.rank" in watched[pid] for pid in ranks)
    assert "parallel_backend serve" in watched[status.pid]
    assert not run("-m", "parallel_backend", "stop", env=closed).returncode


@pytest.mark.parametrize("arguments", [("serve", "--listen", "127.0.0.1:0"), ("host", "--help"), ("status",)])
def test_the_room_is_closed(arguments: tuple[str, ...], closed: dict[str, str]) -> None:
    """What concerns other machines fails there, so the test above would."""
    answer = run("-m", "parallel_backend", *arguments, env=closed | {"PARALLEL_DIT_BACKEND": "10.0.0.1:7400"})
    assert "the room of other machines is closed" in answer.stderr
