"""What a rank tells its supervisor arrives in the order in which it was true."""

import threading

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
