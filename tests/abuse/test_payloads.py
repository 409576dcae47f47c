"""Bytes of tensors that are no tensors, too few or too many: they are numbers, and never anything else."""

import io
import os
import pickle
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from parallel_backend.client.client import Client
from parallel_backend.errors import MAX_MESSAGE, InvalidRequest
from parallel_backend.protocol import deadlines
from parallel_backend.protocol.endpoint import connect
from parallel_backend.protocol.messages import Continue, Done, Trial
from parallel_backend.protocol.tensors import recv_tensors
from scripts.processes import wait_until
from tests.faults.backend import TWO_RANKS, sample, tensors

from .raw import SECONDS, answers, frame, header, last_frame, tensor


class Runs:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


def pickled(file: Path) -> bytes:
    return pickle.dumps(Runs(file))


def saved(file: Path) -> bytes:
    buffer = io.BytesIO()
    torch.save(Runs(file), buffer)
    return buffer.getvalue()


def replies(sock: socket.socket) -> dict[str, torch.Tensor]:
    """Return the tensors of a request's reply."""
    assert isinstance(last_frame(sock).message, Continue)
    done = last_frame(sock)
    assert isinstance(done.message, Done)
    return recv_tensors(sock, done.tensors, deadline=deadlines.Deadline(SECONDS, "the tensors"))


@pytest.mark.parametrize("kind", [pickled, saved])
def test_a_pickle_in_place_of_a_tensor_is_numbers(client: Client, tmp_path: Path, kind: Any) -> None:
    data = kind(tmp_path / "ran")
    sent = frame(header(tensors=[tensor(dtype="uint8", shape=[len(data)])])) + data
    with connect(client.endpoint, seconds=SECONDS) as sock:
        sock.sendall(sent)
        received = replies(sock)
    assert received["x"].numpy().tobytes() == data
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", [pickled, saved])
def test_a_pickle_in_place_of_a_header_is_refused(client: Client, tmp_path: Path, kind: Any) -> None:
    data = kind(tmp_path / "ran")
    for sent in (data, frame(data)):
        with connect(client.endpoint, seconds=SECONDS) as sock:
            sock.sendall(sent)
            assert answers(sock).code == "protocol"
    assert not (tmp_path / "ran").exists()


def test_fewer_bytes_than_the_shape_says_are_waited_for_until_the_client_goes(client: Client) -> None:
    with connect(client.endpoint, seconds=SECONDS) as sock:
        sock.sendall(frame(header(tensors=[tensor(shape=[1000])])) + b"x" * 3999)
        wait_until(lambda: client.status().running, SECONDS, "rank 0 waits for the last byte")
    wait_until(lambda: client.status().running is None, SECONDS, "the request is over")


def test_more_bytes_than_the_shape_says_are_not_read(client: Client) -> None:
    """Neither as tensors nor as another message."""
    stop = frame(header("Stop", {}))
    with connect(client.endpoint, seconds=SECONDS) as sock:
        sock.sendall(frame(header(tensors=[tensor(dtype="uint8", shape=[4])])) + b"abcd" + stop)
        received = replies(sock)
    assert received["x"].tolist() == list(b"abcd")


@pytest.mark.parametrize("shape", [[1 << 38], [1 << 19, 1 << 19], [1 << 38, 1]])
def test_a_tensor_without_room_takes_none(client: Client, shape: list[int]) -> None:
    """256 GiB. The rank refuses, or waits for bytes that never come without taking their memory."""
    with connect(client.endpoint, seconds=SECONDS) as sock:
        sock.sendall(frame(header(tensors=[tensor(dtype="uint8", shape=shape)])))
        answer = last_frame(sock).message
        if isinstance(answer, Continue):  # as with vm.overcommit_memory=1
            time.sleep(0.5)
            assert all(rank.memory < 2 << 30 for rank in client.status().ranks)
        else:
            assert answer.code == InvalidRequest.code
            assert "bytes does not fit into memory" in answer.message


def test_an_empty_tensor_of_a_large_shape_is_empty(client: Client) -> None:
    back = client.call(Trial(name="echo", model=TWO_RANKS), {"x": torch.empty(0, 1 << 37)})
    assert back["x"].shape == (0, 1 << 37)


@pytest.mark.parametrize("make", [-1, 1 << 37, 1 << 62, 1 << 80])
def test_an_echo_of_no_size_is_refused(client: Client, make: int) -> None:
    with pytest.raises(InvalidRequest, match="numbers cannot be made, or do not fit into memory"):
        client.call(Trial(name="echo", model=TWO_RANKS, amount=make), {})


def test_a_refusal_that_quotes_much_is_shortened(client: Client) -> None:
    """Whole, it would outgrow the header of the answer, and what a rank may tell the supervisor."""
    with pytest.raises(InvalidRequest, match="this request cannot work: refuse xxx") as caught:
        client.call(sample("refuse " + "x" * 120_000), tensors(1))
    assert len(str(caught.value)) <= MAX_MESSAGE
