"""The queue, cancels, and clients that do not speak the protocol."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from parallel_backend.client.client import Client
from parallel_backend.client.exchange import Timeouts
from parallel_backend.client.query import ask
from parallel_backend.errors import (
    BackendFailure,
    Cancelled,
    DeadlineExceeded,
    InvalidRequest,
    ProtocolError,
    QueueFull,
    RankFailed,
)
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol import deadlines, frames
from parallel_backend.protocol.endpoint import Endpoint, connect
from parallel_backend.protocol.messages import Done, Error, Outcome, Progress, Trial
from parallel_backend.protocol.model_spec import Devices, ModelSpec
from parallel_backend.protocol.tensors import DTYPES, describe
from parallel_backend.supervisor.limits import Limits, Patience
from scripts.processes import wait_until

from .backend import TWO_RANKS, Running, sample, start_fake, tensors


def test_every_dtype_and_shape_comes_back(client: Client) -> None:
    sent = {name: torch.arange(24).reshape(2, 3, 4).to(dtype) for name, dtype in DTYPES.items()}
    sent |= {"scalar": torch.tensor(3.5), "empty": torch.empty(0, 4), "strided": torch.arange(12.0).reshape(3, 4).T}
    back = client.call(Trial(name="echo", model=TWO_RANKS), sent)
    assert list(back) == list(sent)
    for name, tensor in sent.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor)


def test_progress_comes_with_previews(client: Client) -> None:
    reports: list[tuple[Progress, dict[str, torch.Tensor]]] = []
    client.call(sample(), tensors(3), on_progress=lambda *report: reports.append(report))
    steps = [(progress.value, progress.total) for progress, _ in reports if progress.phase == "sampling"]
    assert steps == [(1, 3), (2, 3), (3, 3)]
    previews = [extra["preview"] for progress, extra in reports if progress.phase == "sampling"]
    assert all(torch.equal(preview, torch.ones(2, 3)) for preview in previews)
    assert reports[0][0].phase in ("accepted", "queued")


def test_a_client_hears_that_its_devices_end_the_ranks_of_others(runtime: Path) -> None:
    client = start_fake(runtime)

    def notes(*indices: int) -> list[str]:
        reports: list[Progress] = []
        spec = ModelSpec(path="/", devices=Devices(kind="cpu", indices=indices))
        client.call(sample(spec=spec), tensors(1), on_progress=lambda progress, extra: reports.append(progress))
        return list(dict.fromkeys(report.note for report in reports if report.note))

    assert notes(0, 1) == []
    first = client.status().generation
    assert notes(0) == []
    assert client.status().generation == first
    (note,) = notes(1, 0)
    start = "the ranks end, and others start: they run on devices 0,1, and this request names devices 1,0: one set of "
    assert note.startswith(start)
    assert client.status().generation == first + 1
    assert f": {note}" in client.endpoint.log.read_text()


def test_an_interrupt_ends_a_running_request_within_a_step(client: Client) -> None:
    running = Running(client=client, message=sample()).in_step()
    running.stop.set()
    # All of its steps together would take ten times as long.
    assert isinstance(running.ended(5.0), Cancelled)
    wait_until(lambda: client.status().running is None, 1.0, "every rank has reported the end")
    pids = [rank.pid for rank in client.status().ranks]
    assert client.call(sample(), tensors(1))
    assert [rank.pid for rank in client.status().ranks] == pids


def test_an_interrupt_ends_a_queued_request_at_once(client: Client) -> None:
    first = Running(client=client, message=sample()).in_step()
    second = Running(client=client, message=sample())
    wait_until(lambda: client.status().queued == (second.message.request_id,), 5.0, "the second request is queued")
    second.stop.set()
    assert isinstance(second.ended(2.0), Cancelled)
    assert second.progress[0] == Progress(phase="queued", value=0, total=1)
    assert client.status().running == first.message.request_id
    first.stop.set()
    assert isinstance(first.ended(5.0), Cancelled)


def test_an_interrupt_while_ranks_start(runtime: Path) -> None:
    client = start_fake(runtime)
    running = Running(client=client, message=sample())
    wait_until(lambda: running.progress, 5.0, "the request is accepted")
    running.stop.set()
    assert isinstance(running.ended(2.0), Cancelled)
    assert client.call(sample(), tensors(1))


def test_an_exception_from_on_progress_cancels(client: Client) -> None:
    def fail(progress: Progress, _: dict[str, torch.Tensor]) -> None:
        if progress.phase == "sampling":
            raise LookupError("from the caller")

    with pytest.raises(LookupError):
        client.call(sample(), tensors(1000), on_progress=fail)
    wait_until(lambda: client.status().running is None, 5.0, "the request was cancelled")


def test_ranks_that_do_not_heed_a_cancel_are_ended(client: Client) -> None:
    running = Running(client=client, message=sample("deaf")).in_step()
    running.stop.set()
    assert isinstance(running.ended(10.0), Cancelled)
    assert not client.status().ranks
    with pytest.raises(Cancelled, match="did not end a cancelled request within 3 s"):
        ask(client.endpoint, Outcome(request_id=running.message.request_id), Done)


def test_a_full_queue(runtime: Path) -> None:
    client = start_fake(runtime, limits=Limits(queue=2))
    calls = [Running(client=client, message=sample()).in_step()]
    calls += [Running(client=client, message=sample()) for _ in range(2)]
    wait_until(lambda: len(client.status().queued) == 2, 5.0, "two requests are queued")
    with pytest.raises(QueueFull, match="2 requests are already queued"):
        client.call(sample(), tensors(1))
    for call in reversed(calls):
        call.stop.set()
        assert isinstance(call.ended(5.0), Cancelled)


def test_keepalives_keep_a_waiting_client_patient(client: Client) -> None:
    first = Running(client=client, message=sample()).in_step()
    patient = Client(endpoint=client.endpoint, timeouts=Timeouts(connect=3.0))
    second = Running(client=patient, message=sample())
    time.sleep(4.5)
    assert second.error is None
    first.stop.set()
    second.in_step().stop.set()
    assert isinstance(second.ended(5.0), Cancelled)
    assert first.ended(5.0)


def test_silence_of_working_ranks_has_a_deadline(client: Client) -> None:
    client.call(sample(), tensors(1))
    impatient = Client(endpoint=client.endpoint, timeouts=Timeouts(silence=0.001))
    with pytest.raises(DeadlineExceeded, match="a message from the ranks took longer than"):
        impatient.call(sample(), tensors(50))
    wait_until(lambda: client.status().running is None, 5.0, "the request was cancelled")


def test_a_layout_that_does_not_fit_starts_nothing(runtime: Path) -> None:
    client = start_fake(runtime)
    spec = ModelSpec(path="/", devices=TWO_RANKS.devices, layout=ParallelLayout(ulysses=3))
    with pytest.raises(InvalidRequest, match='layout "ulysses=3" needs 3 ranks and there are 2'):
        client.call(sample(spec=spec), tensors(1))
    with pytest.raises(InvalidRequest, match="no device"):
        client.call(sample(spec=ModelSpec(path="/", devices=Devices(kind="cpu", indices=()))), tensors(1))
    assert not client.status().ranks


def test_a_dtype_that_the_wire_does_not_carry_starts_nothing(runtime: Path) -> None:
    with pytest.raises(InvalidRequest, match="float64"):
        Client(endpoint=Endpoint(folder=runtime)).call(
            Trial(name="echo", model=TWO_RANKS), {"x": torch.zeros(2, dtype=torch.float64)}
        )
    assert not (runtime / "socket").exists()


@pytest.mark.parametrize(
    ("sent", "sentence"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "does not speak Parallel DiT's protocol"),
        (
            frames.PREFIX.pack(frames.MAGIC, frames.VERSION + 1, 10),
            f"version {frames.VERSION + 1} and this process version {frames.VERSION}",
        ),
        (frames.PREFIX.pack(frames.MAGIC, frames.VERSION, frames.MAX_HEADER + 1), "exceeds the limit"),
        (frames.PREFIX.pack(frames.MAGIC, frames.VERSION, 4) + b"\xff{}]", "does not decode"),
        (frames.PREFIX.pack(frames.MAGIC, frames.VERSION, 24) + b'{"type":"Exec","body":1}', "unknown message 'Exec'"),
        (frames.pack(frames.Frame(message=Done())), "Done is not a request"),
    ],
    ids=["http", "version", "length", "json", "message", "reply"],
)
def test_garbage_is_refused_and_does_no_harm(client: Client, sent: bytes, sentence: str) -> None:
    with connect(client.endpoint, seconds=5) as sock:
        sock.sendall(sent)
        answer = frames.recv_header(sock, deadline=deadlines.Deadline(5, "an answer")).message
    assert isinstance(answer, Error)
    assert answer.code == "protocol"
    assert sentence in answer.message
    assert client.status().state == "idle"


def test_half_a_header_and_a_disconnection(client: Client) -> None:
    for _ in range(100):
        with connect(client.endpoint, seconds=5) as sock:
            sock.sendall(b"PDi")
    assert client.status().state == "idle"


def test_a_client_that_never_sends_its_tensors_can_be_cancelled(client: Client) -> None:
    message = sample()
    metas = describe({"x": torch.zeros(1000)})
    with connect(client.endpoint, seconds=5) as sock:
        sock.sendall(frames.pack(frames.Frame(message=message, tensors=metas)))
        wait_until(lambda: client.status().running == message.request_id, 30.0, "rank 0 waits for the tensors")
    wait_until(lambda: client.status().running is None, 5.0, "the request is over")
    generation = client.status().generation
    assert client.call(sample(), tensors(1))
    assert client.status().generation == generation, "the other ranks, which have not heard of it, stay"


def test_an_unknown_outcome(client: Client) -> None:
    with pytest.raises(BackendFailure, match="does not know how request nothing ended"):
        ask(client.endpoint, Outcome(request_id="nothing"), Done)


VERSION_99 = """
import socket, struct, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
while True:
    sock, _ = listener.accept()
    sock.recv(1 << 16)
    sock.sendall(struct.pack("!4sHI", b"PDiT", 99, 2) + b"{}")
"""


def test_a_backend_of_another_version_is_named_and_can_be_stopped(runtime: Path) -> None:
    client = Client(endpoint=Endpoint(folder=runtime))
    process = subprocess.Popen([sys.executable, "-c", VERSION_99, str(client.endpoint.socket)])
    try:
        wait_until(client.endpoint.socket.exists, 10.0, "it listens")
        with pytest.raises(ProtocolError, match=f"version 99 and this process version {frames.VERSION}: stop the"):
            client.call(sample(), tensors(1))
        stopping = threading.Thread(target=client.stop)
        stopping.start()
        assert process.wait(10) == -signal.SIGTERM
        stopping.join(10)
        assert not stopping.is_alive()
    finally:
        process.kill()
        process.wait(10)


def test_too_little_patience_for_a_start(runtime: Path) -> None:
    client = start_fake(runtime, limits=Limits(patience=Patience(start=0.3)))
    error = Running(client=client, message=sample()).ended(10.0)
    assert isinstance(error, RankFailed)
    assert "rank 0 (pid" in str(error)
    assert "did not start within 0.3 s" in str(error)
