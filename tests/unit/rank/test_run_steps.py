"""What rank 0 answers to the steps on a run's connection, and when it waits for no more of them."""

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from parallel_backend.errors import BackendError
from parallel_backend.protocol import frames
from parallel_backend.protocol.deadlines import Deadline, send_all
from parallel_backend.protocol.frames import Frame, TensorMeta
from parallel_backend.protocol.messages import Done, Forward, Step, Unload
from parallel_backend.protocol.model_spec import Devices, ModelSpec
from parallel_backend.protocol.tensors import bytes_of, recv_tensors
from parallel_backend.rank import run_steps
from parallel_backend.rank.account import Account
from parallel_backend.rank.run_steps import RunSteps
from parallel_backend.rank.supervisor_link import ReceivedRequest

SPEC = ModelSpec(path="/model", devices=Devices(kind="cpu", indices=(0,)))
LATENT = TensorMeta(name="0.hidden_states", dtype="float32", shape=(2, 3))
SAME = replace(LATENT, name="1.hidden_states", same="0.hidden_states")
METAS = (LATENT, TensorMeta(name="0.text", dtype="float32", shape=(4,), digest="a"), SAME)
RESULTS = {"0": torch.arange(3.0)}


class Side:
    """A client's end of the connection, and rank 0's steps."""

    def __init__(self) -> None:
        self.sock, theirs = socket.socketpair()
        message = Forward(model=SPEC, branches=2, steps=True)
        self.request = ReceivedRequest(frame=Frame(message=message, tensors=METAS), header=b"", connection=theirs)
        self.failures: list[BackendError | ConnectionError] = []
        self.account = Account()
        self.steps = RunSteps(self.request, self.account, timeout=0.5, pinned=False, on_failure=self.failures.append)

    def send(self, message: object, metas: tuple[TensorMeta, ...] = (), tensor: Tensor | None = None) -> None:
        send_all(self.sock, frames.pack(Frame(message=message, tensors=metas)), deadline=Deadline(5.0, "sending"))
        if tensor is not None:
            self.sock.sendall(bytes_of(tensor))

    def reply(self) -> tuple[object, dict[str, Tensor]]:
        deadline = Deadline(5.0, "receiving")
        frame = frames.recv_header(self.sock, deadline=deadline)
        return frame.message, recv_tensors(self.sock, frame.tensors, deadline=deadline)


@pytest.fixture
def side() -> Iterator[Side]:
    made = Side()
    yield made
    made.sock.close()
    made.request.connection.close()


def test_a_step_has_the_tensors_that_change(side: Side) -> None:
    latent = torch.arange(6.0).reshape(2, 3)
    side.send(Step(), (LATENT, SAME), latent)
    found = side.steps.next(RESULTS)
    assert found is not None
    assert list(found) == ["0.hidden_states", "1.hidden_states"]
    assert all(torch.equal(tensor, latent) for tensor in found.values())
    message, results = side.reply()
    assert message == Done(open=True)
    assert torch.equal(results["0"], RESULTS["0"])
    assert side.steps.answered


def test_the_client_ends_a_run(side: Side) -> None:
    side.sock.shutdown(socket.SHUT_WR)
    assert side.steps.next(RESULTS) is None
    assert side.steps.answered


def test_a_silent_client_loses_the_ranks(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_steps, "IDLE", 0.1)
    start = time.monotonic()
    assert side.steps.next(RESULTS) is None
    assert 0.1 <= time.monotonic() - start < 5.0
    assert side.steps.answered


@pytest.mark.parametrize("reason", ["gives_way", "cancelled"])
def test_a_request_that_waits_ends_the_wait_for_a_step(side: Side, reason: str) -> None:
    threading.Timer(0.1, getattr(side.request, reason).set).start()
    start = time.monotonic()
    assert side.steps.next(RESULTS) is None
    assert time.monotonic() - start < 5.0
    assert side.steps.answered


@pytest.mark.parametrize("reason", ["gives_way", "cancelled"])
def test_if_a_request_waits_already_the_answer_is_the_last(side: Side, reason: str) -> None:
    getattr(side.request, reason).set()
    assert side.steps.next(RESULTS) is None
    assert not side.steps.answered


@pytest.mark.parametrize(
    ("message", "metas"),
    [
        (Step(), (LATENT,)),
        (Step(), (replace(LATENT, shape=(3, 2)), replace(SAME, shape=(3, 2)))),
        (Step(), METAS),
        (Unload(model=SPEC), (LATENT, SAME)),
    ],
)
def test_what_is_no_step_of_the_run_ends_it(side: Side, message: object, metas: tuple[TensorMeta, ...]) -> None:
    side.send(message, metas, torch.zeros(6))
    assert side.steps.next(RESULTS) is None


def test_a_step_that_arrives_in_part_ends_the_run(side: Side) -> None:
    side.send(Step(), (LATENT, SAME), torch.zeros(5))
    assert side.steps.next(RESULTS) is None


def test_a_step_without_room_ends_the_run(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "empty", Mock(side_effect=RuntimeError("CUDA error: out of memory")))
    side.send(Step(), (LATENT, SAME), torch.zeros(6))
    assert side.steps.next(RESULTS) is None
    assert side.steps.answered


def test_a_client_that_cancels_within_a_step_frees_the_ranks_at_once(side: Side) -> None:
    side.steps = RunSteps(side.request, side.account, timeout=60.0, pinned=False, on_failure=side.failures.append)
    side.send(Step(), (LATENT, SAME))
    threading.Timer(0.1, side.request.cancelled.set).start()
    start = time.monotonic()
    assert side.steps.next(RESULTS) is None
    assert time.monotonic() - start < 5.0
    assert side.steps.answered


def test_a_request_that_waits_does_not_break_a_step_that_has_begun(side: Side) -> None:
    latent = torch.arange(6.0).reshape(2, 3)
    side.send(Step(), (LATENT, SAME))

    def rest() -> None:
        side.request.gives_way.set()
        time.sleep(0.2)
        side.sock.sendall(bytes_of(latent))

    threading.Timer(0.1, rest).start()
    found = side.steps.next(RESULTS)
    assert found is not None
    assert torch.equal(found["0.hidden_states"], latent)


def test_garbage_ends_the_run(side: Side) -> None:
    side.sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert side.steps.next(RESULTS) is None


def test_a_client_that_does_not_read_is_a_failure(side: Side) -> None:
    assert side.steps.next({"0": torch.zeros(4 << 20)}) is None
    assert len(side.failures) == 1
    assert not side.steps.answered
