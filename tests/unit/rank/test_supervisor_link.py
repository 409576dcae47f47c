"""What a rank tells its supervisor arrives in the order in which it was true."""

import socket
import threading

import msgspec
import pytest

from parallel_backend.protocol import rank_control
from parallel_backend.protocol.status import RankStatus
from parallel_backend.rank.supervisor_link import SupervisorLink


def status(steps: int) -> RankStatus:
    return RankStatus(rank=0, pid=1, device="cpu", memory=0, steps=steps)


def test_a_status_read_earlier_never_arrives_after_a_later_one():
    supervisor, rank = rank_control.pair()
    reading, go_on = threading.Event(), threading.Event()

    def slow() -> RankStatus:
        reading.set()
        assert go_on.wait(10)
        return status(1)

    link = SupervisorLink(rank, describe=slow)
    heartbeat = threading.Thread(target=link._send_heartbeat)
    heartbeat.start()
    assert reading.wait(10)
    link.describe = lambda: status(2)
    finished = threading.Thread(target=link.report_finished, args=(rank_control.Finished(request_id="a", code="done"),))
    finished.start()
    finished.join(0.2)
    go_on.set()
    for thread in (heartbeat, finished):
        thread.join(10)
    received = [rank_control.receive(supervisor, rank_control.FromRank)[0] for _ in range(3)]
    assert [message.status.steps for message in received[:2]] == [1, 2]
    assert isinstance(received[2], rank_control.Finished)


@pytest.mark.parametrize(
    "header", [b'{"type":"Gone","body":{}}', b'{"type":"Done","body":{},"x":' + b"[" * 5000 + b"]" * 5000 + b"}"]
)
def test_a_request_that_does_not_decode_is_reported_and_its_connection_closed(header):
    """The report names what is wrong; the supervisor then ends the set."""
    supervisor, rank = rank_control.pair()
    link = SupervisorLink(rank, describe=lambda: status(0))
    client, connection = socket.socketpair()
    message = msgspec.json.encode(rank_control.Run(header=msgspec.Raw(b"1"))).replace(b":1", b":" + header)
    with connection:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, connection.fileno().to_bytes(4, "little"))]
        supervisor.sendmsg([message], rights)
    link._receive()
    assert isinstance(rank_control.receive(supervisor, rank_control.FromRank)[0], rank_control.Heartbeat)
    finished, _ = rank_control.receive(supervisor, rank_control.FromRank)
    assert finished.code == "rank_failed"
    assert finished.message.startswith("got a message from the supervisor that cannot be read: ")
    client.settimeout(1.0)
    assert client.recv(1) == b""
    assert link.take(0.0) is None


def test_a_rank_reports_its_status_before_it_is_ready():
    supervisor, rank = rank_control.pair()
    SupervisorLink(rank, describe=lambda: status(3)).report_ready()
    received = [rank_control.receive(supervisor, rank_control.FromRank)[0] for _ in range(2)]
    assert received == [rank_control.Heartbeat(status=status(3)), rank_control.Ready()]
