"""What is pushed to the panel, and when."""

import threading
import time

import pytest
from any_folder_name.nodes.panel import snapshot, watch
from any_folder_name.parallel_backend.client.status_text import fields
from any_folder_name.parallel_backend.protocol.status import LoadedModel, RankStatus, Status, Work

pytestmark = pytest.mark.newest
SHOWN = {"state": "off", "status": None, "busy": True, "steps": {}, "trouble": None}
RANK = RankStatus(rank=0, pid=2, device="cpu", memory=1 << 30, device_total=8 << 30, load=0.52)
STATUS = Status(
    pid=1, protocol=1, generation=1, state="busy", running="a", queued=(), layout=None, idle_timeout=1.0, memory=5,
    ranks=(RANK,), work=Work(kind="Forward", seconds=1.0),
)  # fmt: skip


def until(condition, seconds=10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == watch.THREAD]


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(watch, "BUSY", 0.01)
    monkeypatch.setattr(watch, "IDLE", 0.01)
    yield
    until(lambda: not threads())


def test_a_page_gets_a_snapshot_at_once_and_others_only_when_something_changed() -> None:
    sent, looks, shown = [], [], dict(SHOWN)
    watchers = watch.Watchers(lambda *event: sent.append(event), lambda: looks.append(1) or dict(shown))
    watchers.watch("page")
    until(lambda: len(looks) > 20)
    assert sent == [(watch.EVENT, SHOWN, "page")]
    shown["state"] = "idle"
    until(lambda: len(sent) == 2)
    watchers.watch("other")
    until(lambda: len(sent) == 3)
    assert sent[2] == (watch.EVENT, shown, "other")
    watchers.leave("page")
    watchers.leave("other")


def test_nobody_looks_when_no_page_watches() -> None:
    looks = []
    watchers = watch.Watchers(lambda *_: None, lambda: looks.append(1) or dict(SHOWN))
    assert not threads()
    watchers.watch("page")
    until(lambda: looks)
    watchers.leave("page")
    until(lambda: not threads())
    seen = len(looks)
    time.sleep(0.1)
    assert len(looks) == seen


def test_a_page_that_is_gone_ends_by_itself() -> None:
    now = [0.0]
    watchers = watch.Watchers(lambda *_: None, lambda: dict(SHOWN), clock=lambda: now[0])
    watchers.watch("page")
    assert watchers.pages == ("page",)
    now[0] = watch.LEASE + 1
    until(lambda: not watchers.pages)


def test_a_failing_look_is_logged_and_tried_again(caplog) -> None:
    answers = iter([RuntimeError("boom"), SHOWN])
    sent = []

    def look():
        answer = next(answers, SHOWN)
        if isinstance(answer, Exception):
            raise answer
        return answer

    watchers = watch.Watchers(lambda *event: sent.append(event), look)
    watchers.watch("page")
    until(lambda: sent)
    watchers.leave("page")
    assert "boom" in caplog.text


def changed(**changes):
    return SHOWN | {"status": fields(STATUS) | changes}


def rank(**changes):
    return changed(ranks=[fields(STATUS)["ranks"][0] | changes])


@pytest.mark.parametrize(
    "other",
    [
        changed(memory=9),
        changed(work=fields(STATUS)["work"] | {"seconds": 9.0}),
        rank(memory=(1 << 30) + 5),
        rank(load=0.49),
        rank(progress={"phase": "", "step": 0, "count": 9, "quiet": 3.0}),
    ],
)
def test_what_changes_while_nothing_happens_is_not_pushed(other) -> None:
    assert snapshot.without_clocks(other) == snapshot.without_clocks(changed())


@pytest.mark.parametrize(
    "other",
    [
        changed(state="idle"),
        changed(queued=["b"]),
        changed(work=None),
        rank(memory=2 << 30),
        rank(load=0.9),
        rank(progress={"phase": "sampling", "step": 1}),
        rank(models=[fields(STATUS)["ranks"][0]["models"], LoadedModel(path="/m", dtype="x", parts=(), loads=1)]),
        SHOWN | {"trouble": {"text": "no"}},
    ],
)
def test_what_happens_is_pushed(other) -> None:
    assert snapshot.without_clocks(other) != snapshot.without_clocks(changed())
