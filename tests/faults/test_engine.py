"""The real engine behind the real supervisor: a rank that dies in a step, a cancel, and the status."""

import ipaddress
import os
import signal
import socket
import stat
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from lab.engine import lab_ranks
from parallel_backend import processes
from parallel_backend.client.client import Client
from parallel_backend.errors import Cancelled, InvalidRequest, RankFailed
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.endpoint import Endpoint
from parallel_backend.protocol.messages import Forward, Progress, Sample, Trial
from parallel_backend.protocol.model_spec import Devices, ModelSpec
from parallel_backend.verify import examples
from scripts.processes import wait_until
from tests.support import tiny

from .backend import Running
from .conftest import runtime_folder

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with runtime_folder() as folder:
        yield Client(endpoint=Endpoint(folder=folder))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    folder = tiny.write(tmp_path_factory.mktemp("tiny") / "model", tiny.Tiny(layers=3))
    return ModelSpec(path=str(folder), devices=Devices(kind="cpu", indices=(0, 1)), layout=ParallelLayout(ulysses=2))


def with_layout(model: ModelSpec, text: str) -> ModelSpec:
    layout = ParallelLayout.parse(text)
    return replace(model, layout=layout, devices=Devices(kind="cpu", indices=tuple(range(layout.ranks))))


def request(model: ModelSpec, steps: int) -> tuple[Sample, Tensors]:
    torch.manual_seed(0)
    inputs = {"x": torch.randn(1, 16, 1, 8, 8), "sigmas": torch.linspace(1, 0, steps + 1)}
    inputs |= {f"{i}.encoder_hidden_states": torch.randn(1, 6, 32) for i in range(2)}
    return Sample(model=model, branches=2, sampler="euler", cfg=3.0), inputs


def start_sampling(client: Client, model: ModelSpec) -> Running:
    """Start a long step loop, and wait until it has finished a step."""
    message, inputs = request(model, 20_000)
    return Running(client=client, message=message, tensors=inputs).in_step(120.0)


def loads_by_rank(client: Client) -> list[tuple[int, list[int]]]:
    """The pid of each rank and how often it has loaded weights, once all ranks have reported the last request's end."""
    wait_until(lambda: client.status().state == "idle", 10.0, "the request is over on every rank")
    wait_until(lambda: _settled(client), 20.0, "every rank has reported its loads")
    return _loads(client)


def _settled(client: Client) -> bool:
    """Whether no rank reports another number of loads within twice the time between two reports."""
    before = _loads(client)
    time.sleep(1.0)
    return _loads(client) == before


def _loads(client: Client) -> list[tuple[int, list[int]]]:
    return [(rank.pid, [loaded.loads for loaded in rank.models]) for rank in client.status().ranks]


def test_sampling_twice_loads_once_and_the_status_is_true(client: Client, model: ModelSpec) -> None:
    first = client.call(*request(model, 3))["samples"]
    second = client.call(*request(model, 3))["samples"]
    assert torch.equal(first, second)
    assert first.shape == (1, 16, 1, 8, 8)
    wait_until(
        lambda: all(rank.steps == 6 for rank in client.status().ranks),
        5.0,
        "two calls of 3 steps, whose branches are one batch",
    )
    status = client.status()
    assert status.layout == model.layout
    for rank in status.ranks:
        assert psutil.Process(rank.pid).ppid() == status.pid
        assert [(loaded.path, loaded.loads) for loaded in rank.models] == [(model.path, 1)]


def _is_loopback(ip: str) -> bool:
    address = ipaddress.ip_address(ip)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def test_nobody_else_can_reach_a_backend_that_works(client: Client, model: ModelSpec) -> None:
    """Whatever listens, listens on this machine alone, and only this user can open what is in the folder."""
    running = start_sampling(client, model)
    found = [psutil.Process(client.status().pid), *(psutil.Process(rank.pid) for rank in client.status().ranks)]
    sockets = [connection for process in found for connection in process.net_connections("inet")]
    listening = [connection.laddr.ip for connection in sockets if connection.status == psutil.CONN_LISTEN]
    assert listening, "the store of rank 0 listens, at least"
    assert {_is_loopback(ip) for ip in listening} == {True}, listening
    peers = {connection.raddr.ip for connection in sockets if connection.raddr}
    assert peers, "the ranks are connected"
    assert {_is_loopback(ip) for ip in peers} == {True}, peers
    assert not [each for each in sockets if each.type == socket.SOCK_DGRAM]
    modes = {path: path.lstat().st_mode for path in [client.endpoint.folder, *client.endpoint.folder.rglob("*")]}
    assert {stat.S_IMODE(mode) for mode in modes.values() if stat.S_ISDIR(mode)} == {0o700}
    assert {stat.S_IMODE(mode) for mode in modes.values() if not stat.S_ISDIR(mode)} == {0o600}
    assert {"socket", "lock", "backend.log", "rank0.log"} <= {path.name for path in modes}
    running.stop.set()
    assert isinstance(running.ended(30.0), Cancelled)


@pytest.mark.parametrize("layout", ["ulysses=2", "pipe=3"])
@pytest.mark.daily(1)
def test_a_rank_killed_in_a_step_is_named_and_the_next_request_works(
    client: Client, model: ModelSpec, layout: str
) -> None:
    model = with_layout(model, layout)
    before = client.call(*request(model, 3))["samples"]
    running = start_sampling(client, model)
    pid = client.status().ranks[1].pid
    start = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    error = running.ended(10.0)
    assert time.monotonic() - start < 10.0
    assert isinstance(error, RankFailed)
    assert f"rank 1 (pid {pid}) was killed by SIGKILL" in str(error)
    assert torch.equal(client.call(*request(model, 3))["samples"], before)


@pytest.mark.parametrize("layout", ["ulysses=2", "pipe=2"])
@pytest.mark.daily(1)
def test_an_interrupt_keeps_the_ranks_and_their_weights(client: Client, model: ModelSpec, layout: str) -> None:
    model = with_layout(model, layout)
    client.call(*request(model, 2))
    before = loads_by_rank(client)
    running = start_sampling(client, model)
    running.stop.set()
    assert isinstance(running.ended(10.0), Cancelled)
    client.call(*request(model, 2))
    assert loads_by_rank(client) == before


def test_a_folder_that_is_no_pipeline_is_refused_and_costs_no_ranks(client: Client, tmp_path: Path) -> None:
    bad = ModelSpec(path=str(tmp_path), devices=Devices(kind="cpu", indices=(0, 1)))
    with pytest.raises(InvalidRequest, match=str(tmp_path)):
        client.call(*request(bad, 2))
    generation = client.status().generation
    with pytest.raises(InvalidRequest):
        client.call(*request(bad, 2))
    assert client.status().generation == generation


def test_pixels_bypass_a_stopped_supervisor_and_are_held_once(runtime: Path) -> None:
    spec = ModelSpec(path="/", devices=Devices(kind="cpu", indices=(0, 1)))
    client = Client(endpoint=Endpoint(folder=runtime))
    with lab_ranks():
        client.call(Trial(name="echo", model=spec, amount=1))
    supervisor = client.status().pid

    def stop_supervisor(progress: Progress, _: Tensors) -> None:
        if progress.phase == "reply":
            os.kill(supervisor, signal.SIGSTOP)

    processes.reset_peak_memory(os.getpid())
    before = processes.peak_memory(os.getpid())
    try:
        made = client.call(Trial(name="echo", model=spec, amount=75_000_000), on_progress=stop_supervisor)["made"]
    finally:
        os.kill(supervisor, signal.SIGCONT)
    grown = processes.peak_memory(os.getpid()) - before
    assert (made == 0.5).all()
    assert grown < 1.2 * made.nbytes


def test_the_status_has_the_layout_that_the_ranks_chose(client: Client, tmp_path: Path) -> None:
    """The supervisor does not know that frames of this model attend only to themselves."""
    folder = examples.write_checkpoint(tmp_path, examples.module("STDiT3", "video"))
    model = ModelSpec(path=str(folder), devices=Devices(kind="cpu", indices=(0, 1)))
    inputs = examples.inputs("STDiT3", "video", batch=2)
    client.call(Forward(model=model, branches=1), {f"0.{name}": each for name, each in inputs.items()})
    wait_until(lambda: client.status().layout == ParallelLayout(dsp=2), 5.0, "the status says dsp=2")
