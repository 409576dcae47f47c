"""Weights are freed with the last holder of a model, and nothing of that disturbs ComfyUI's own threads."""

import dataclasses
import gc
import logging
import sys
import time
from types import SimpleNamespace
from typing import Any

import comfy.model_management
import pytest
from any_folder_name.nodes.backend import session
from any_folder_name.nodes.backend.held_models import THREAD, HeldModels
from any_folder_name.parallel_backend.errors import Cancelled, DeadlineExceeded, RankFailed
from any_folder_name.parallel_backend.protocol.model_spec import ModelSpec
from helpers.inside_fixtures import Loaded, empty_latent, ksampler

DELAY = 0.02
PATIENCE = 60.0


class Freeing:
    """Frees models in turn as the answers say, and keeps which."""

    def __init__(self, *answers: bool | Exception) -> None:
        self.answers, self.asked = iter(answers), list[str]()

    def __call__(self, spec: ModelSpec) -> bool:
        self.asked.append(spec.path)
        answer = next(self.answers)
        if isinstance(answer, Exception):
            raise answer
        return answer


def spec_of(loaded: Loaded, path: str) -> ModelSpec:
    spec: ModelSpec = dataclasses.replace(loaded.model.model.diffusion_model.handle.spec, path=path)
    return spec


def ended(held: HeldModels) -> bool:
    """Wait until the thread of ``held`` has ended, and return whether it was there."""
    thread = held._thread
    if thread is not None:
        assert thread.name == THREAD
        thread.join(PATIENCE)
        assert not thread.is_alive()
    return thread is not None


def test_a_model_is_freed_after_its_last_holder_and_the_thread_ends(loaded: Loaded) -> None:
    freeing = Freeing(True, True)
    held, spec = HeldModels(freeing, DELAY), spec_of(loaded, "/one")
    assert held._thread is None
    for holder in (1, 2):
        held.hold(spec, holder)
    held.release(spec, 1)
    time.sleep(5 * DELAY)
    assert not freeing.asked
    held.release(spec, 2)
    assert ended(held)
    assert freeing.asked == ["/one"]
    held.hold(spec, 3)
    held.release(spec, 3)
    assert ended(held)
    assert freeing.asked == ["/one", "/one"]


def test_it_is_tried_again_while_the_ranks_are_busy_and_after_an_error_it_is_not(
    loaded: Loaded, caplog: pytest.LogCaptureFixture
) -> None:
    freeing = Freeing(False, False, True, OSError("no more files"))
    held = HeldModels(freeing, DELAY)
    for path in ("/busy", "/broken"):
        held.hold(spec_of(loaded, path), path)
        held.release(spec_of(loaded, path), path)
        assert ended(held)
    assert freeing.asked == ["/busy"] * 3 + ["/broken"]
    assert [record.exc_text.rpartition("\n")[2] for record in caplog.records if record.exc_text] == [
        "OSError: no more files"
    ]


@pytest.mark.parametrize(
    ("error", "done"),
    [
        (Cancelled("its turn did not come"), False),
        (RankFailed("rank 0 died"), True),
        (OSError("no more files"), True),
    ],
)
def test_only_busy_ranks_are_asked_again(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, error: Exception, done: bool
) -> None:
    monkeypatch.setattr(loaded.client, "attempt", failing(error))
    assert session.Session(loaded.client).held._free(spec_of(loaded, "/any")) is done


def failing(error: Exception) -> Any:
    def fail(*args: Any, **options: Any) -> Any:
        raise error

    return fail


def test_the_finalizer_takes_no_lock_and_starts_no_thread(loaded: Loaded) -> None:
    session.use(session.Session(loaded.client))
    handle = dataclasses.replace(loaded.model.model.diffusion_model.handle, spec=spec_of(loaded, "/dropped"))
    handle.keep_weights()
    calls: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "c_call":
            calls.append(f"{type(argument.__self__).__name__}.{argument.__name__}")

    sys.setprofile(note)
    try:
        del handle
        gc.collect()
    finally:
        sys.setprofile(None)
    assert "SimpleQueue.put" in calls
    assert not [call for call in calls if "lock" in call.lower() or "thread" in call]
    session.current().held.free_dropped()
    assert [message.model.path for message in loaded.client.of_kind("Unload")] == ["/dropped"]


@pytest.mark.parametrize("error", [OSError("no more files"), RuntimeError("odd"), DeadlineExceeded("late")])
def test_no_error_leaves_comfyuis_memory_management(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    server = SimpleNamespace(send_progress_text=failing(error), prompt_queue=SimpleNamespace(currently_running={}))
    ksampler(loaded.model, empty_latent(), steps=1)
    monkeypatch.setitem(sys.modules, "server", SimpleNamespace(PromptServer=SimpleNamespace(instance=server)))
    monkeypatch.setattr(loaded.client, "status", failing(error))
    comfy.model_management.unload_all_models()
    said = [record.getMessage() + (record.exc_text or "") for record in caplog.records if record.levelno > logging.INFO]
    assert any("free memory" in each and str(error) in each for each in said)
    assert any("node 7 cannot show its text" in each and str(error) in each for each in said)
    loaded.model.clone().detach(unpatch_all=True)
