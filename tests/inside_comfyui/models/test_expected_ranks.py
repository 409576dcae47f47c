"""Ranks prepare from the moment at which a prompt begins, and not before: a prompt that is checked may be refused."""

import copy
import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
from any_folder_name.nodes.backend import session
from any_folder_name.nodes.backend.devices import EXPECTING, expect_ranks
from any_folder_name.nodes.loader import ParallelLoader
from any_folder_name.nodes.model import ParallelModel
from any_folder_name.nodes.vae import ParallelVAE
from any_folder_name.parallel_backend.errors import BackendUnavailable
from any_folder_name.parallel_backend.protocol.model_spec import Devices
from helpers.executor import Executor
from helpers.inside_fixtures import Loaded, validated
from helpers.local_client import LocalClient

LOADER = {"model_name": "tiny", "dtype": "fp32", "devices": "0,1", "attention": "auto"}


@pytest.fixture
def asked(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """``asked(error)`` lets the client note what it is asked to expect, and raise an error; returns the notes."""

    def answer(error: Exception | None = None) -> list[Any]:
        notes = list[Any]()

        def expect(client: LocalClient, devices: Devices) -> None:
            notes.append((devices, threading.current_thread()))
            if error:
                raise error

        monkeypatch.setattr(LocalClient, "expect", expect)
        session.use(session.Session(loaded.client))
        return notes

    return answer


def waited() -> None:
    """Wait for the threads that ask."""
    for thread in threading.enumerate():
        if thread.name == EXPECTING:
            thread.join(10.0)
            assert not thread.is_alive()


def test_ranks_prepare_when_a_prompt_begins(asked: Callable[..., list[Any]]) -> None:
    notes, executor = asked(), Executor(ParallelLoader)
    assert validated("tiny", "fp32", "0,1") is True
    waited()
    assert notes == []
    prompt = {
        "loader": {"class_type": "ParallelLoader", "inputs": LOADER},
        "out": {"class_type": "Recorder", "inputs": {"value": ["loader", 0]}},
    }
    for prompts in (1, 2):  # the loader runs in the first alone
        executor.run(copy.deepcopy(prompt))  # ComfyUI notes fingerprints in a prompt
        waited()
        assert [devices for devices, _ in notes] == [Devices(kind="cpu", indices=(0, 1))] * prompts
    assert "loader" not in executor.executed
    assert all(thread.daemon for _, thread in notes), "ComfyUI ends without waiting for them"


@pytest.mark.parametrize("node", [ParallelLoader, ParallelModel, ParallelVAE])
def test_devices_of_another_node_are_not_known(
    node: Any, asked: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = asked()
    monkeypatch.setattr(node, "hidden", type("Hidden", (), {"unique_id": "1"}), raising=False)
    for devices in ({}, {"devices": None}):
        node.fingerprint_inputs(**devices)
    waited()
    assert notes == []
    node.fingerprint_inputs(devices="0")
    waited()
    assert [devices for devices, _ in notes] == [Devices(kind="cpu", indices=(0,))]


@pytest.mark.parametrize(
    ("error", "level"), [(BackendUnavailable("it does not start"), logging.INFO), (RuntimeError("odd"), logging.ERROR)]
)
def test_a_backend_that_does_not_start_is_logged(
    error: Exception, level: int, asked: Callable[..., list[Any]], caplog: pytest.LogCaptureFixture
) -> None:
    """Its first request says so to the user."""
    caplog.set_level(logging.INFO)
    asked(error)
    expect_ranks("0,1")
    waited()
    (record,) = [record for record in caplog.records if "prepare" in record.getMessage()]
    assert record.levelno == level
    assert str(error) in caplog.text
