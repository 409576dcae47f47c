"""What a rank writes reaches the first host as it was written."""

import sys

from parallel_backend.machines.nodes import host_control
from parallel_backend.machines.nodes.hosted_rank import _CHUNK, HostedRank
from parallel_backend.supervisor.event_loop import EventLoop
from parallel_backend.supervisor.ranks.rank_start import start_process

WRITES = """
import os, sys
text = ("a" * (CHUNK - 1) + "é") * 2 + "日本"
data = text.encode() + b"\\xe6\\x97"  # cut off in a character
while data:
    data = data[os.write(1, data):]
"""


def test_a_character_on_the_edge_of_a_chunk_is_whole():
    events = EventLoop()
    sent: list[host_control.FromHost] = []
    code = WRITES.replace("CHUNK", str(_CHUNK))
    rank = HostedRank(
        key=1, events=events, send=sent.append,
        start=lambda output: start_process([sys.executable, "-c", code], environment={}, output=output),
    )  # fmt: skip
    for _ in range(1000):
        if rank.exited:
            break
        events.run_once(0.02)
    assert isinstance(sent[-1], host_control.RankExited)
    text = "".join(message.text for message in sent if isinstance(message, host_control.RankWrote))
    assert text == ("a" * (_CHUNK - 1) + "é") * 2 + "日本\ufffd"
