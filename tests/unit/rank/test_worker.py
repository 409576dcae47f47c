"""How long a rank waits for a request, and what it does when none comes."""

from unittest.mock import Mock

import pytest
import torch.distributed as dist

from parallel_backend.protocol import frames
from parallel_backend.rank import worker
from parallel_backend.rank.worker import REST_TIMEOUT, WAIT_TIMEOUT, Worker

NONE, REQUEST = False, True


class _EndError(Exception):
    pass


def waits(monkeypatch, rank, *events):
    """What a rank does in turn, in seconds that it waits and words, if these come of its waiting."""
    done: list[str | float] = []
    coming = iter(events)

    def comes(seconds):
        done.append(seconds)
        event = next(coming, None)
        if event is None:
            raise _EndError
        return event

    def wait(keys, timeout):
        if not comes(timeout.total_seconds()):
            raise dist.DistStoreError

    def run_request(*_, **__):
        done.append("request")
        return (None,)

    engine, link, store = Mock(), Mock(), Mock(wait=wait)
    link.take.side_effect = lambda seconds: comes(seconds) or None
    engine.rest.side_effect = lambda: done.append("rest")
    monkeypatch.setattr(Worker, "_lead", lambda *_: done.append("request"))
    monkeypatch.setattr(Worker, "_run_request", run_request)
    monkeypatch.setattr(Worker, "_mark_read", lambda *_: None)
    monkeypatch.setattr(worker, "report_end", lambda *_: None)
    monkeypatch.setattr(frames, "unpack", Mock())
    with pytest.raises(_EndError):
        Worker(rank=rank, world_size=2, engine=engine, link=link, store=store).run()
    return done


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_rests_once_after_its_requests(monkeypatch, rank):
    rest, wait = REST_TIMEOUT.total_seconds(), WAIT_TIMEOUT.total_seconds()
    done = waits(monkeypatch, rank, REQUEST, REQUEST, NONE, NONE, REQUEST, NONE)
    assert done == [
        rest, "request", rest, "request", rest, "rest", wait, wait, "request", rest, "rest", wait,
    ]  # fmt: skip
