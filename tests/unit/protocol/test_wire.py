"""Frames: they decode to what was encoded, even byte by byte, and no memory is allocated beyond a limit."""

import os
import re
import resource
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from parallel_backend.errors import DeadlineExceeded, InvalidRequest, ProtocolError
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol import deadlines, frames, tensors
from parallel_backend.protocol.messages import MESSAGES, Done, Progress, Sample
from parallel_backend.protocol.model_spec import Devices, ModelSpec
from parallel_backend.protocol.status import StatusQuery
from tests.support.refused_headers import HEADERS


def soon(seconds: float = 5.0) -> deadlines.Deadline:
    return deadlines.Deadline(seconds, "a test")


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    a, b = socket.socketpair()
    with a, b:
        yield a, b


SPEC = ModelSpec(path="/m", devices=Devices(kind="cpu", indices=(0, 1)), layout=ParallelLayout(cfg=2))


def test_a_request_survives_encoding() -> None:
    metas = tensors.describe({"x": torch.zeros(1, 16, 3, 4, 5), "sigmas": torch.zeros(4)})
    frame = frames.Frame(message=Sample(model=SPEC, branches=2, sampler="euler", cfg=5.0), tensors=metas)
    packed = frames.pack(frame)
    assert frames.unpack(packed[frames.PREFIX.size :]) == frame


def test_every_message_is_listed_by_its_name() -> None:
    assert all(name == cls.__name__ for name, cls in MESSAGES.items())


def test_a_header_that_arrives_byte_by_byte(ends: tuple[socket.socket, socket.socket]) -> None:
    a, b = ends
    packed = frames.pack(frames.Frame(message=Progress(phase="sample", value=1, total=2)))
    reader = frames.HeaderReader(b)
    for byte in packed[:-1]:
        a.sendall(bytes([byte]))
        assert reader.advance() is None
        assert reader.started
    a.sendall(packed[-1:] + b"tensor bytes")
    frame = reader.advance()
    assert frame is not None
    assert frame.message == Progress(phase="sample", value=1, total=2)
    assert b.recv(100) == b"tensor bytes"


@pytest.mark.parametrize(("header", "sentence"), HEADERS.values(), ids=HEADERS)
def test_a_bad_header_is_refused(header: bytes, sentence: str) -> None:
    with pytest.raises(ProtocolError, match=re.escape(sentence)):
        frames.unpack(header)


def test_the_sender_refuses_what_exceeds_a_limit() -> None:
    metas = tuple(frames.TensorMeta(name=str(i), dtype="uint8", shape=(1,)) for i in range(frames.MAX_TENSORS + 1))
    with pytest.raises(InvalidRequest, match="257 tensors"):
        frames.pack(frames.Frame(message=Done(), tensors=metas))
    with pytest.raises(InvalidRequest, match="header bytes"):
        frames.pack(frames.Frame(message=Progress(phase="x" * frames.MAX_HEADER, value=0, total=1)))


def test_waiting_has_a_deadline_and_is_polled(ends: tuple[socket.socket, socket.socket]) -> None:
    polls: list[float] = []
    start = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"a test took longer than 0.3 s"):
        frames.recv_header(ends[1], deadline=soon(0.3), poll=lambda: polls.append(time.monotonic()))
    assert 0.25 < time.monotonic() - start < 2.0
    assert len(polls) >= 3


def test_sending_to_a_peer_that_does_not_read_has_a_deadline(ends: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(DeadlineExceeded):
        deadlines.send_all(ends[0], bytes(1 << 26), deadline=soon(0.3))


def test_a_refusal_is_read_although_the_peer_closed_first(ends: tuple[socket.socket, socket.socket]) -> None:
    near, far = ends
    far.sendall(frames.pack(frames.Frame(message=Done())))
    far.close()
    deadline = deadlines.Deadline(5, "a test")
    frames.send_header(near, frames.pack(frames.Frame(message=StatusQuery())), deadline=deadline)
    assert frames.recv_header(near, deadline=deadline).message == Done()


def test_an_exception_from_poll_ends_a_transfer(ends: tuple[socket.socket, socket.socket]) -> None:
    def poll() -> None:
        raise LookupError

    with pytest.raises(LookupError):
        deadlines.send_all(ends[0], bytes(1 << 26), deadline=soon(), poll=poll)
    with pytest.raises(LookupError):
        tensors.recv_tensors(ends[1], tensors.describe({"x": torch.zeros(1 << 24)}), deadline=soon(), poll=poll)


def test_tensors_arrive_whole(ends: tuple[socket.socket, socket.socket]) -> None:
    torch.manual_seed(0)
    sent = {"a": torch.randn(1_000_000), "b": torch.arange(7).to(torch.int32), "c": torch.randn(3, 4).T.bfloat16()}
    thread = threading.Thread(target=tensors.send, args=(ends[0], Done(), sent), kwargs={"deadline": soon()})
    thread.start()
    frame = frames.recv_header(ends[1], deadline=soon())
    received = tensors.recv_tensors(ends[1], frame.tensors, deadline=soon())
    thread.join(5)
    assert frame.message == Done()
    assert {name: tensor.dtype for name, tensor in received.items()} == {name: t.dtype for name, t in sent.items()}
    assert all(torch.equal(received[name], sent[name]) for name in sent)


def test_a_connection_that_breaks_in_a_tensor(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[0].sendall(bytes(10))
    ends[0].close()
    with pytest.raises(ConnectionError, match="in the middle of a tensor"):
        tensors.recv_tensors(ends[1], tensors.describe({"x": torch.zeros(10)}), deadline=soon())


def test_a_descriptor_above_1023(ends: tuple[socket.socket, socket.socket]) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limits[1] < 2000:
        pytest.skip("this process may not have so many descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2000, limits[1]))
    high = os.dup2(ends[1].fileno(), 1500)
    try:
        with socket.socket(fileno=high) as sock:
            timer = threading.Timer(0.2, lambda: ends[0].sendall(frames.pack(frames.Frame(message=Done()))))
            timer.start()
            assert frames.recv_header(sock, deadline=soon()).message == Done()
            timer.join(5)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
