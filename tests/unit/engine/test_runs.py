"""Which requests repeat each other, and which tensors of earlier requests a rank keeps."""

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from parallel_backend.distributed.world import world
from parallel_backend.engine.kept_tensors import KeptTensors
from parallel_backend.engine.runs import MOST, Runs
from parallel_backend.engine.shared_tensors import complete, share_changing, share_constant
from parallel_backend.interfaces.geometry import LATENT, SOUND, TIMESTEP
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.frames import TensorMeta
from parallel_backend.protocol.messages import CHANGING, Forward
from parallel_backend.protocol.model_spec import Adapter, Devices, ModelSpec, Overlay
from parallel_backend.protocol.run_key import run_key

MESSAGE = Forward(model=ModelSpec(path="/model", devices=Devices(kind="cpu", indices=(0, 1))), branches=2)
SPEC = MESSAGE.model


def meta(name: str, digest: str = "", same: str = "", shape: tuple[int, ...] = (2,)) -> TensorMeta:
    return TensorMeta(name=name, dtype="float32", shape=shape, digest=digest, same=same)


METAS = (
    meta("0.hidden_states"), meta("0.timestep"), meta("0.encoder_hidden_states", "a"),
    meta("1.hidden_states", same="0.hidden_states"), meta("1.timestep", same="0.timestep"),
    meta("1.encoder_hidden_states", "b"),
)  # fmt: skip


def test_latent_and_timestep_have_the_names_that_families_know() -> None:
    assert CHANGING == (LATENT, SOUND, TIMESTEP)


def test_steps_that_differ_in_latent_and_timestep_repeat_each_other() -> None:
    assert run_key(MESSAGE, METAS) == run_key(replace(MESSAGE, request_id="another"), METAS)
    assert hash(run_key(MESSAGE, METAS)) == hash(run_key(replace(MESSAGE, request_id="another"), METAS))


@pytest.mark.parametrize(
    "changed",
    [
        {"skipped": ((1,), ())},
        {"adapters": ((Adapter(path="/lora", id="1", strength=0.5),), ())},
        {"overlay": Overlay(path="/overlay", id="1")},
        {"adapt": False},
        {"sampling": "another"},
        {"model": replace(SPEC, layout=ParallelLayout(ulysses=2))},
        {"model": replace(SPEC, stamp="2")},
        {"model": replace(SPEC, dtype="bfloat16")},
        {"model": replace(SPEC, attention="sdpa")},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_another_request_is_another_run(changed) -> None:
    assert run_key(MESSAGE, METAS) != run_key(replace(MESSAGE, **changed), METAS)


def test_another_conditioning_or_shape_is_another_run() -> None:
    for other in (meta("1.encoder_hidden_states", "c"), meta("1.encoder_hidden_states", "b", shape=(3,))):
        assert run_key(MESSAGE, METAS) != run_key(MESSAGE, (*METAS[:-1], other))


def test_without_a_digest_nothing_says_that_a_request_repeats() -> None:
    assert run_key(MESSAGE, (*METAS[:-1], meta("1.encoder_hidden_states"))) is None
    assert run_key(MESSAGE, (meta("0.hidden_states", "a"), *METAS[1:])) is None, "a latent has none"


def test_the_most_recently_used_runs_stay() -> None:
    runs, kept = Runs(), [Mock(constant=()) for _ in range(MOST + 1)]
    for number, run in enumerate(kept):
        runs.put(number, run)
        used = 0 if number < MOST else 2
        runs.put(used, runs.take(used))
    assert [number for number in range(MOST + 1) if runs.get(number)] == [0, *range(2, MOST + 1)]
    assert [run.release.called for run in kept] == [False, True, *[False] * (MOST - 1)]
    runs.clear()
    assert runs.get(0) is None
    assert all(run.release.called for run in kept)


def test_the_tensors_of_all_runs_take_little_memory() -> None:
    text, one, other = (torch.ones(2) for _ in range(3))
    runs, kept = Runs(max_bytes=16), [Mock(constant=(text, each)) for each in (text, one, other)]
    for number, run in enumerate(kept):
        runs.put(number, run)
    assert [number for number in range(3) if runs.get(number)] == [2], "24 bytes with one of the others"
    runs.put(3, Mock(constant=(torch.ones(9),)))
    assert runs.get(3) is not None, "one may be larger than all that is kept"


def test_a_run_that_is_carried_out_is_not_released() -> None:
    runs, run = Runs(), Mock(constant=())
    runs.put(0, run)
    assert runs.take(0) is run
    runs.clear()
    assert not run.release.called
    assert runs.get(0) is None


def test_kept_tensors_leave_by_their_use_and_are_known_by_shape_and_dtype() -> None:
    kept = KeptTensors(max_bytes=20)
    kept.add("a", torch.ones(2))
    kept.add("b", torch.zeros(2))
    assert kept.get(meta("x", "a")) is not None
    kept.add("c", torch.zeros(2))
    assert kept.names([meta("1", "a"), meta("2", "b"), meta("3", "c"), meta("4")]) == ("1", "3")
    assert kept.get(meta("x", "a", shape=(1, 2))) is None
    assert kept.get(replace(meta("x", "a"), dtype="int32")) is None
    assert kept.clear()
    assert not kept.clear()


def test_one_tensor_may_be_larger_than_all_that_is_kept() -> None:
    kept = KeptTensors(max_bytes=4)
    kept.add("a", torch.ones(2))
    assert kept.names([meta("1", "a")]) == ("1",)


def test_a_request_is_whole_again_on_every_rank() -> None:
    kept, alone, cpu = KeptTensors(), world(0, 1), torch.device("cpu")
    received = {"0.hidden_states": torch.ones(2), "0.timestep": torch.zeros(2)}
    text = {"0.encoder_hidden_states": torch.full((2,), 3.0), "1.encoder_hidden_states": torch.full((2,), 4.0)}
    for sent in (received | text, received):  # the second request sends no text
        whole = complete(METAS, sent, kept)
        constant = share_constant(METAS, whole, kept, alone, cpu)
        shared = share_changing(METAS, whole, constant, alone, cpu)
        assert list(whole) == list(shared) == [each.name for each in METAS]
        assert shared["1.hidden_states"] is shared["0.hidden_states"]
        assert torch.equal(shared["1.encoder_hidden_states"], text["1.encoder_hidden_states"])
