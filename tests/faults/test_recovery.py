"""A run goes on after the death of a rank, of the supervisor or of a device, and gives the same latent."""

import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from parallel_backend.client import retry
from parallel_backend.client.client import Client
from parallel_backend.errors import BackendUnavailable, InvalidRequest, QueueFull, RankFailed
from parallel_backend.protocol import request_log
from parallel_backend.protocol.messages import FORECASTS, Forward, Sample, Trial, new_id
from parallel_backend.step_cache.settings import StepCache
from parallel_backend.supervisor.limits import Limits
from scripts.processes import wait_until
from tests.support import tiny

from .conftest import runtime_folder
from .losing_rank import CLIENT_TIMEOUT, CUT_OFF, LOST_DEVICES, SUPERVISOR
from .real_ranks import HALF, STEPS, Call, Tensors, let_die, model, relative_error, request, start

LONG = pytest.mark.long
SAME_RANKS, FEWER_RANKS = 1e-5, 1e-4
SAMPLERS = ("uni_pc", "euler", "dpmpp_2m", "euler_ancestral")


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with runtime_folder() as folder:
        yield start(folder)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny.write(tmp_path_factory.mktemp("tiny") / "model", tiny.Tiny(heads=3, layers=3)))


def computed(client: Client) -> int:
    """Steps that the ranks of the present set have computed."""
    before = -1
    while (now := client.status().ranks[0].steps) != before:
        before = now
        time.sleep(1.1)
    return now


@pytest.mark.parametrize("sampler", ["uni_pc", *(pytest.param(name, marks=LONG) for name in SAMPLERS[1:])])
def test_a_run_goes_on_after_a_rank_dies(client: Client, path: str, sampler: str) -> None:
    message, inputs = request(model(path, "ulysses=3"), sampler)
    wanted = client.call(message, inputs)["samples"]
    before = computed(client)
    client.call(message, inputs)
    forwards = (computed(client) - before) // STEPS
    let_die(client, (1, HALF))
    call = Call(client=client)
    samples = call.run(message, inputs)["samples"]
    assert relative_error(samples, wanted) <= SAME_RANKS
    assert call.steps == list(range(1, STEPS + 1)), "each step is reported once"
    resumed = computed(client) // forwards
    assert STEPS - HALF <= resumed <= STEPS - HALF + 1, "at most one step is computed twice"
    (said,) = call.said
    assert f"going on after step {STEPS - resumed}, since rank 1" in said
    assert "was killed by SIGKILL" in said
    assert call.notes == {"", f"going on after step {STEPS - resumed}"}


@pytest.mark.parametrize(("layout", "ranks"), [("ulysses=3", 3), ("cfg=2", 2), (None, 3)])
@LONG
def test_a_run_goes_on_with_one_device_fewer(client: Client, path: str, layout: str | None, ranks: int) -> None:
    spec, last = model(path, layout, ranks), ranks - 1
    message, inputs = request(spec, "dpmpp_2m")
    wanted = client.call(message, inputs)["samples"]
    let_die(client, (last, HALF))
    lost_devices, call = client.endpoint.folder / LOST_DEVICES, Call(client=client)
    lost_devices.write_text(str(last))
    try:
        assert relative_error(call.run(message, inputs)["samples"], wanted) <= FEWER_RANKS
        assert call.steps == list(range(1, STEPS + 1))
        assert len(call.said) == 2
        assert f"on {last} CPU rank" in call.said[1]
        assert call.lost.without(spec).devices.indices == tuple(range(last))
        again = Call(client=client, lost=call.lost)
        assert relative_error(again.run(message, inputs)["samples"], wanted) <= FEWER_RANKS
        assert not again.said, "later requests do without the device"
    finally:
        lost_devices.unlink()
    call.lost.forget()
    assert call.lost.without(spec) == spec


@LONG
def test_an_approximate_run_warms_up_again_and_says_so(client: Client, path: str) -> None:
    message, inputs = request(model(path, "pipe=3 patches=3"))
    wanted = client.call(message, inputs)["samples"]
    let_die(client, (0, HALF))
    call = Call(client=client)
    assert relative_error(call.run(message, inputs)["samples"], wanted) < 0.2
    assert "with a step of warm-up, since rank 0" in call.said[0]


@pytest.mark.parametrize("after", [HALF, pytest.param(HALF + 1, marks=LONG)])
def test_a_run_with_a_step_cache_begins_it_anew_and_says_so(client: Client, path: str, after: int) -> None:
    """Of two steps one is forecast, so a rank dies in one of each kind."""
    message, inputs = request(model(path, "ulysses=3"))
    message = replace(message, cache=StepCache(interval=2, warmup=2))
    wanted = client.call(message, inputs)
    assert wanted[FORECASTS].tolist() == [STEPS // 2 - 1, STEPS]
    let_die(client, (1, after))
    call = Call(client=client)
    found = call.run(message, inputs)
    assert relative_error(found["samples"], wanted["samples"]) < 0.2
    assert call.steps == list(range(1, STEPS + 1))
    (said,) = call.said
    assert ", where the step cache begins anew, since rank 1" in said
    forecasts, calls = found[FORECASTS].tolist()
    assert STEPS - after <= calls <= STEPS - after + 1
    assert 0 < forecasts < calls // 2
    assert torch.equal(client.call(message, inputs)["samples"], wanted["samples"])


def test_a_forward_is_asked_again(client: Client, path: str) -> None:
    inputs = {"0.hidden_states": torch.randn(1, 16, 1, 8, 8), "0.timestep": torch.tensor([500.0])}
    inputs["0.encoder_hidden_states"] = torch.randn(1, 6, 32)
    message = Forward(model=model(path, "ulysses=3"), branches=1)
    wanted = client.call(message, inputs)["0"]
    psutil.Process(client.status().ranks[2].pid).suspend()  # found by its missing heartbeat, during the request
    call = Call(client=client)
    assert torch.equal(call.run(message, inputs)["0"], wanted)
    assert call.said[0].startswith("asking again, since rank 2")


@pytest.fixture
def own(path: str, tmp_path: Path) -> tuple[Path, Path]:
    """A model, and the file of its transformer."""
    copied = Path(shutil.copytree(path, tmp_path / "model"))
    return copied, copied / "transformer" / "diffusion_pytorch_model.safetensors"


@LONG
def test_a_weight_file_that_is_cut_off_while_it_is_read(client: Client, path: str, own: tuple[Path, Path]) -> None:
    folder, file = own
    message, inputs = request(model(str(folder), "ulysses=3"))
    (client.endpoint.folder / CUT_OFF).write_text(f"1 {file}")
    call = Call(client=client)
    with pytest.raises(InvalidRequest, match=f"{file} has .* bytes of weights, and its header lists"):
        call.run(message, inputs)
    (said,) = call.said  # of one of the ranks that were reading
    assert " was killed by SIGBUS: a file that it used was cut off, or its disk failed" in said
    assert "Bus error in File " in said
    intact = model(path, "ulysses=3")
    assert torch.isfinite(client.call(*request(intact))["samples"]).all()


@LONG
def test_a_weight_file_that_is_deleted_while_its_model_is_loaded(
    client: Client, path: str, own: tuple[Path, Path]
) -> None:
    folder, file = own
    message, inputs = request(model(str(folder), "ulysses=3"))
    wanted = client.call(message, inputs)["samples"]
    file.unlink()
    assert torch.equal(client.call(message, inputs)["samples"], wanted), "the ranks have it in memory"
    let_die(client, (1, HALF))
    with pytest.raises(InvalidRequest, match=str(file.parent)):
        Call(client=client).run(message, inputs)
    intact = model(path, "ulysses=3")
    assert torch.equal(client.call(*request(intact))["samples"], wanted)


@LONG
def test_ranks_that_die_again_and_again_do_not_end_the_run(client: Client, path: str) -> None:
    message, inputs = request(model(path, "ulysses=2", 2))
    wanted = client.call(message, inputs)["samples"]
    let_die(client, (1, 3), (0, 9), (1, 15))
    call = Call(client=client)
    assert relative_error(call.run(message, inputs)["samples"], wanted) <= SAME_RANKS
    assert len(call.said) == 3


def test_a_second_death_at_the_same_step_is_an_error(client: Client, path: str) -> None:
    message, inputs = request(model(path, "ulysses=2", 2))
    let_die(client, (0, 1), (0, 1))  # before the step is reported
    call = Call(client=client)
    with pytest.raises(RankFailed, match="was killed by SIGKILL"):
        call.run(message, inputs)
    assert len(call.said) == 1


def test_a_run_survives_its_supervisor(runtime: Path, path: str) -> None:
    message, inputs = request(model(path, "ulysses=2", 2), "dpmpp_2m")
    client = start(runtime)
    wanted = client.call(message, inputs)["samples"]
    let_die(client, (0, HALF), target=SUPERVISOR)
    call = Call(client=client)
    assert relative_error(call.run(message, inputs)["samples"], wanted) <= SAME_RANKS
    assert "the backend ended in the middle of a request" in call.said[0]


@pytest.mark.parametrize(
    ("layout", "first"),
    [
        ("ulysses=2", 3),
        # Its last report but one, which carries what is kept, follows the last flag that could stop it.
        pytest.param("pipe=2 patches=1", STEPS - 2, marks=LONG),
    ],
)
def test_a_run_goes_on_after_its_client_stood_still(runtime: Path, path: str, layout: str, first: int) -> None:
    (runtime / CLIENT_TIMEOUT).write_text("2")
    client = start(runtime)
    message, inputs = slow_to_read(path, layout)
    wanted = client.call(message, inputs)["samples"]
    call = Call(client=client, stands_still_at=first)
    assert relative_error(call.run(message, inputs)["samples"], wanted) <= SAME_RANKS
    assert call.steps == list(range(1, STEPS + 1))
    (said,) = call.said
    assert said.endswith("since ComfyUI stood still: its progress was not read within 2 s")


@LONG
def test_a_run_goes_on_after_its_client_stood_still_for_so_long_that_the_backend_ended(
    runtime: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (runtime / CLIENT_TIMEOUT).write_text("2")
    monkeypatch.setattr(retry, "STOOD_STILL", 3.0)
    client = start(runtime, idle_timeout=5.0)
    message, inputs = slow_to_read(path, "ulysses=2")
    wanted = client.call(message, inputs)["samples"]
    call = Call(client=client, stands_still_at=3, until_it_ends=True)
    assert relative_error(call.run(message, inputs)["samples"], wanted) <= SAME_RANKS
    assert call.steps == list(range(1, STEPS + 1))
    (said,) = call.said
    assert "since the backend ended in the middle of a request" in said


def slow_to_read(path: str, layout: str) -> tuple[Sample, Tensors]:
    """A request of which one step's report fills the buffers of a socket."""
    message, inputs = request(model(path, layout, 2))
    return message, inputs | {"x": torch.randn(2, 16, 1, 40, 40)}


@LONG
def test_a_run_that_goes_on_waits_for_room_in_the_queue(client: Client, path: str) -> None:
    message, inputs = request(model(path, "ulysses=2", 2))
    wanted = client.call(message, inputs)["samples"]
    let_die(client, (0, HALF))
    with ThreadPoolExecutor(Limits().queue) as others:
        answers: list[Future[Tensors]] = []

        def fill_the_queue() -> None:
            echo = Trial(name="echo", model=message.model)
            answers.extend(
                others.submit(client.call, replace(echo, request_id=new_id()), {"x": torch.zeros(3)})
                for _ in range(Limits().queue)
            )
            wait_until(lambda: len(client.status().queued) == Limits().queue, 20.0, "the queue is full")

        call = Call(client=client, before_asking=fill_the_queue)
        assert relative_error(call.run(message, inputs)["samples"], wanted) <= SAME_RANKS
        assert all(answer.result(60.0) for answer in answers)
    assert call.steps == list(range(1, STEPS + 1))
    codes = [line.outcome for line in request_log.read(client.endpoint.request_log)]
    assert QueueFull.code in codes


@LONG
def test_a_run_whose_backend_is_stopped_starts_no_other(runtime: Path, path: str) -> None:
    message, inputs = request(model(path, "ulysses=2", 2))
    client = start(runtime)
    client.call(message, inputs)
    let_die(client, (0, HALF), target=SUPERVISOR, number=signal.SIGTERM)
    call = Call(client=client)
    with pytest.raises(BackendUnavailable):
        call.run(message, inputs)
    assert not call.said
    with pytest.raises(BackendUnavailable):
        client.status()


def test_ranks_that_fail_to_start_at_first_are_an_error(runtime: Path, path: str) -> None:
    (runtime / LOST_DEVICES).write_text("1")
    call = Call(client=start(runtime))
    with pytest.raises(RankFailed, match="the device is not there") as caught:
        call.run(*request(model(path, "ulysses=2", 2)))
    assert caught.value.not_started == (1,)
    assert not call.said
