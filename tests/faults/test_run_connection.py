"""The steps of a sampler in ComfyUI share a connection, and give the ranks back to whoever else needs them."""

import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

from lab.engine.echo import ECHO
from parallel_backend.client.client import Client
from parallel_backend.client.retry import Recovery, RetriedRequest
from parallel_backend.errors import Cancelled
from parallel_backend.progress import CLIENT
from parallel_backend.protocol.messages import Forward, Trial
from scripts.processes import wait_until

from .backend import TWO_RANKS, Running, sample, start_fake, tensors
from .test_logs import logged

TEXT = torch.arange(8.0)


def forward() -> Forward:
    return Forward(model=TWO_RANKS, branches=2)


def step(value: float, text: torch.Tensor = TEXT) -> dict[str, torch.Tensor]:
    """The tensors of a step with two branches."""
    latent, time_of = torch.full((2, 3), value), torch.tensor([value])
    names = {"hidden_states": latent, "timestep": time_of, "encoder_hidden_states": text}
    return {f"{i}.{name}": tensor for i in range(2) for name, tensor in names.items()}


def predicted(client: Client, value: float, text: torch.Tensor = TEXT) -> None:
    assert torch.equal(client.call(forward(), step(value, text))["0"], torch.full((2, 3), 2 * value))


def call_often(client: Client, stop: threading.Event) -> None:
    for value in range(2, 100):
        client.call(forward(), step(float(value)), interrupted=stop.is_set)


def phases(client: Client) -> set[str]:
    return {rank.progress.phase for rank in client.status().ranks}


def another(client: Client) -> Client:
    return Client(endpoint=client.endpoint, timeouts=client.timeouts)


def test_steps_share_a_connection_until_the_client_ends_the_run(client: Client) -> None:
    before = len(logged(client, 0))
    for value in (1.0, 2.0, 3.0):
        predicted(client, value)
    status = client.status()
    assert (status.state, status.queued) == ("busy", ())
    wait_until(lambda: phases(client) == {CLIENT}, 5.0, "the ranks have said that they wait for the client")
    client.end_run()
    assert client.status().state == "idle"
    (line,) = logged(client, before + 1)[before:]
    latent_and_time = (6 + 1) * 4
    assert (line.kind, line.steps, line.outcome) == ("Forward", 3, "done")
    assert (line.received, line.sent) == (TEXT.nbytes + 3 * latent_and_time, 3 * 6 * 4)


def test_another_text_is_another_run(client: Client) -> None:
    before = len(logged(client, 0))
    predicted(client, 1.0)
    predicted(client, 2.0, TEXT + 1)
    predicted(client, 3.0)
    client.end_run()
    assert [line.steps for line in logged(client, before + 3)[before:]] == [1, 1, 1]


def test_another_request_of_the_client_does_not_wait(client: Client) -> None:
    predicted(client, 1.0)
    start = time.monotonic()
    phases: list[str] = []
    trial = Trial(model=TWO_RANKS, name=ECHO)
    client.call(trial, {"x": TEXT}, on_progress=lambda progress, _: phases.append(progress.phase))
    assert time.monotonic() - start < 1.0
    assert "queued" not in phases


def test_requests_of_others_get_their_turn_between_steps(client: Client) -> None:
    predicted(client, 1.0)
    start = time.monotonic()
    another(client).call(sample(), tensors(2))
    assert time.monotonic() - start < 2.0
    predicted(client, 2.0)
    client.end_run()


def test_two_clients_take_turns(client: Client) -> None:
    failures: list[BaseException] = []

    def sample_all(one: Client, first: float) -> None:
        try:
            for i in range(8):
                predicted(one, first + i)
            one.end_run()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=sample_all, args=(another(client), 10.0 * i)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert not failures
    assert client.status().state == "idle"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.daily(1)
def test_ranks_that_die_between_steps_are_replaced(client: Client, rank: int) -> None:
    predicted(client, 1.0)
    os.kill(client.status().ranks[rank].pid, signal.SIGKILL)
    notes: list[str] = []
    request = RetriedRequest(client, forward(), step(2.0), recovery=Recovery(notify=notes.append))
    assert torch.equal(request.run()["0"], torch.full((2, 3), 4.0))
    client.end_run()


def test_a_backend_that_was_stopped_between_steps_is_started_again(runtime: Path) -> None:
    client = start_fake(runtime)
    predicted(client, 1.0)
    another(client).stop()
    second = start_fake(runtime)
    predicted(client, 2.0)
    client.end_run()
    second.stop()


def test_a_step_is_cancelled(client: Client) -> None:
    predicted(client, 1.0)
    stop = threading.Event()
    threading.Timer(0.02, stop.set).start()
    with pytest.raises(Cancelled):
        call_often(client, stop)
    wait_until(lambda: client.status().state == "idle", 5.0, "the ranks are free")
    predicted(client, 3.0)
    client.end_run()


def test_a_client_that_dies_frees_the_ranks(client: Client) -> None:
    other = another(client)
    predicted(other, 1.0)
    run = other._run._run
    assert run is not None
    run.connection.close()
    wait_until(lambda: client.status().state == "idle", 2.0, "the ranks are free")
    Running(client=client, message=sample(), tensors=tensors(1)).ended(10.0)
