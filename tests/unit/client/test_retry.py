"""Each row of the table of ``client.retry``: what follows a failure, what the user reads, and when it is an error."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_backend.client import retry
from parallel_backend.client.exchange import NotAccepted, Timeouts
from parallel_backend.client.memory_ladder import SettledLayouts
from parallel_backend.client.retry import Recovery, RetriedRequest
from parallel_backend.errors import (
    BackendUnavailable,
    Cancelled,
    ClientStalled,
    DeadlineExceeded,
    InvalidRequest,
    NoRoom,
    OutOfMemory,
    QueueFull,
    RankFailed,
)
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.endpoint import Endpoint
from parallel_backend.protocol.messages import KEPT, Progress, Sample, Trial
from parallel_backend.protocol.model_spec import Devices, ModelSpec

SPEC = ModelSpec(path="/model", devices=Devices(kind="cpu", indices=(0, 1)), layout=ParallelLayout(cfg=2))
SAMPLE = Sample(model=SPEC, branches=2, sampler="euler", cfg=3.0)
SHARDED = ParallelLayout(ulysses=2, shard_weights=True)
NOT_ACCEPTED = NotAccepted("it ended")


class Backend:
    """A client whose attempts fail in turn. ``(2, error)`` fails after the second step, and ``None`` answers."""

    def __init__(self, folder: Path, *outcomes: Any) -> None:
        self.endpoint, self.timeouts = Endpoint(folder=folder), Timeouts(start=1.0, silence=0.3)
        self._outcomes: Iterator[Any] = iter(outcomes)
        self.asked: list[Any] = []

    def hosts(self) -> tuple[()]:
        return ()

    def attempt(self, message: Any, tensors: Mapping[str, Tensor], *, interrupted: Any, on_progress: Any) -> Any:
        self.asked.append(message)
        outcome = next(self._outcomes)
        step, error = outcome if isinstance(outcome, tuple) else (0, outcome)
        if step:
            on_progress(Progress(phase="sampling", value=step, total=4), {f"{KEPT}x": torch.full((1,), float(step))})
        if error is not None:
            raise error
        return dict(tensors)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "BUSY_POLL", 0.01)
    monkeypatch.setattr(retry, "is_outdated", lambda: False)  # reads all files


def said_by(backend: Backend, message: Any = SAMPLE, **options: Any) -> list[str]:
    """Run a request, and return what the user reads."""
    said: list[str] = []
    recovery = Recovery(notify=said.append, **options)
    RetriedRequest(backend, message, {"x": torch.zeros(1)}, recovery=recovery).run()
    return said


@pytest.mark.parametrize("recovery", [None, Recovery()])
def test_a_backend_that_is_about_to_end_is_asked_again_until_the_deadline(
    tmp_path: Path, recovery: Recovery | None
) -> None:
    backend = Backend(tmp_path, NOT_ACCEPTED, NOT_ACCEPTED, None)
    RetriedRequest(backend, SAMPLE, {}, recovery=recovery).run()
    assert len(backend.asked) == 3
    with pytest.raises(DeadlineExceeded, match="finding a backend that stays"):
        RetriedRequest(Backend(tmp_path, *[NOT_ACCEPTED] * 99), SAMPLE, {}, recovery=recovery).run()


def test_a_process_with_older_files_does_not_look_for_a_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "is_outdated", lambda: True)
    with pytest.raises(BackendUnavailable, match="restart ComfyUI"):
        RetriedRequest(Backend(tmp_path, NOT_ACCEPTED), SAMPLE, {}).run()


@pytest.mark.parametrize("error", [RankFailed("dead"), ClientStalled("late"), QueueFull("full"), OutOfMemory("full")])
def test_without_a_recovery_every_failure_is_an_error(tmp_path: Path, error: Exception) -> None:
    backend = Backend(tmp_path, (2, error))
    with pytest.raises(type(error)):
        RetriedRequest(backend, SAMPLE, {}).run()
    assert backend.asked == [SAMPLE], "as it is, with its id"


@pytest.mark.parametrize("error", [RankFailed("it died"), ClientStalled("it slept")])
def test_a_run_goes_on_after_the_last_step_until_one_step_fails_twice(tmp_path: Path, error: Exception) -> None:
    backend = Backend(tmp_path, (2, error), (3, error), None)
    assert said_by(backend) == [f"going on after step {step}, since {error}" for step in (2, 3)]
    assert [message.first_step for message in backend.asked] == [0, 2, 3]
    assert len({message.request_id for message in backend.asked}) == 3
    with pytest.raises(type(error)):
        said_by(Backend(tmp_path, (2, error), error))


def test_another_request_is_asked_once_more(tmp_path: Path) -> None:
    assert said_by(Backend(tmp_path, RankFailed("it died"), None), Trial(name="echo", model=SPEC)) == [
        "asking again, since it died"
    ]


@pytest.mark.parametrize("told_to_end", [False, True])
def test_a_run_goes_on_if_nobody_told_the_backend_to_end(tmp_path: Path, told_to_end: bool) -> None:
    backend = Backend(tmp_path, (2, BackendUnavailable("it ended")), None)
    if told_to_end:
        with pytest.raises(BackendUnavailable):
            said_by(backend)
    else:
        backend.endpoint.socket.touch()
        assert said_by(backend) == ["going on after step 2, since it ended"]


def test_devices_without_ranks_are_skipped_after_a_failure_and_not_before_one(tmp_path: Path) -> None:
    gone = RankFailed("rank 1 does not start")
    gone.not_started = (1,)
    backend = Backend(tmp_path, (2, RankFailed("it died")), gone, None)
    assert "on 1 CPU rank" in said_by(backend)[-1]
    assert backend.asked[-1].model.devices.indices == (0,)
    with pytest.raises(RankFailed, match="does not start"):
        said_by(Backend(tmp_path, gone))
    with pytest.raises(RankFailed, match="does not start"):
        said_by(Backend(tmp_path, (2, RankFailed("it died")), gone, gone))


def test_only_a_request_that_would_lose_work_waits_for_room_in_the_queue(tmp_path: Path) -> None:
    full = QueueFull("the queue is full")
    assert said_by(Backend(tmp_path, (2, RankFailed("it died")), full, full, None)) == [
        "going on after step 2, since it died"
    ]
    with pytest.raises(QueueFull):
        said_by(Backend(tmp_path, full))
    with pytest.raises(DeadlineExceeded, match="waiting for room in the queue to go on"):
        said_by(Backend(tmp_path, (2, RankFailed("it died")), *[full] * 999))


def test_out_of_memory_goes_down_the_ladder_and_the_layout_with_room_stays(tmp_path: Path) -> None:
    backend, layouts = Backend(tmp_path, NoRoom("A"), (2, OutOfMemory("B")), OutOfMemory("C"), None), SettledLayouts()
    assert said_by(backend, layouts=layouts, free_memory=lambda: True) == [
        "trying again without ComfyUI's own models on these GPUs, since A",
        "trying again with layout ulysses=2, since B",
        "trying again with layout ulysses=2 shard_weights, since C",
    ]
    assert [(message.adapt, message.first_step) for message in backend.asked] == [
        (False, 0), (True, 0), (True, 2), (True, 2),
    ]  # fmt: skip
    assert layouts.of(SPEC).layout == SHARDED
    layouts.forget(SPEC)
    assert layouts.of(SPEC) == SPEC
    said = said_by(Backend(tmp_path, NoRoom("A"), None), layouts=layouts, free_memory=lambda: False)
    assert said == ["fitting the weights into less memory, since A"]
    assert layouts.of(SPEC) == SPEC, "this is no other layout"


def test_without_a_fallback_the_first_error_names_the_layouts(tmp_path: Path) -> None:
    with pytest.raises(NoRoom, match=r"^A; the layouts ulysses=2 and ulysses=2 shard_weights have no room for it"):
        said_by(Backend(tmp_path, NoRoom("A"), OutOfMemory("B"), OutOfMemory("C")))
    with pytest.raises(OutOfMemory, match=r"^A$"):
        said_by(Backend(tmp_path, OutOfMemory("A")), Trial(name="echo", model=SPEC))


@pytest.mark.parametrize("error", [Cancelled("stop"), InvalidRequest("no"), DeadlineExceeded("late")])
def test_anything_else_is_an_error_at_once(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error)):
        said_by(Backend(tmp_path, (2, error)))
