"""Digests say which tensors the ranks may have already; equal latents of several branches are sent once."""

from unittest.mock import Mock

import pytest
import torch

from parallel_backend.client import constant_tensors
from parallel_backend.client.constant_tensors import MAX_BYTES, MOST, ConstantTensors
from parallel_backend.protocol.messages import Decode, Forward
from parallel_backend.protocol.model_spec import Devices, ModelSpec
from parallel_backend.protocol.tensors import is_sent

MODEL = ModelSpec(path="/model", devices=Devices(kind="cpu", indices=(0,)))
TWO = Forward(model=MODEL, branches=2)


def inputs(seed: int = 0, text: float = 1.0) -> dict[str, torch.Tensor]:
    latent = torch.randn(1, 4, 3, 3, generator=torch.Generator().manual_seed(seed))
    found = {}
    for i in range(2):
        found[f"{i}.hidden_states"], found[f"{i}.timestep"] = latent.clone(), torch.tensor([float(seed)])
        found[f"{i}.encoder_hidden_states"] = torch.full((1, 5, 8), text + i)
    return found


def digests(metas):
    return {meta.name: meta.digest for meta in metas if meta.digest}


def test_what_stays_the_same_has_the_same_digest_in_each_step() -> None:
    constants = ConstantTensors()
    first, second = (digests(constants.describe(TWO, inputs(seed))) for seed in (0, 1))
    assert list(first) == ["0.encoder_hidden_states", "1.encoder_hidden_states"]
    assert first == second
    assert len(set(first.values())) == 2
    other = digests(constants.describe(TWO, inputs(1, text=3.0)))
    assert set(other.values()).isdisjoint(first.values())
    assert digests(ConstantTensors().describe(TWO, inputs(2))) == first, "another process finds the same"


def test_a_tensor_that_is_changed_in_place_gets_another_digest() -> None:
    constants, tensors = ConstantTensors(), inputs()
    before = digests(constants.describe(TWO, tensors))
    tensors["0.encoder_hidden_states"][0, 4, 7] += 1.0
    after = digests(constants.describe(TWO, tensors))
    assert [name for name in before if before[name] != after[name]] == ["0.encoder_hidden_states"]


def hashes(monkeypatch) -> Mock:
    """Count what is hashed."""
    counted = Mock(wraps=constant_tensors._digest)
    monkeypatch.setattr(constant_tensors, "_digest", counted)
    return counted


def test_requests_that_take_turns_are_hashed_once(monkeypatch) -> None:
    hashed, constants = hashes(monkeypatch), ConstantTensors()
    turns = [digests(constants.describe(TWO, inputs(text=10.0 * i))) for _ in range(3) for i in range(MOST)]
    assert hashed.call_count == 2 * MOST
    assert turns[:MOST] == turns[MOST : 2 * MOST] == turns[2 * MOST :]


@pytest.mark.parametrize(("most", "again"), [(MAX_BYTES, 0), (4 * 5 * 8 * 4, 0), (4 * 5 * 8 * 4 - 1, 1)])
def test_of_too_many_bytes_the_oldest_are_forgotten(monkeypatch, most, again) -> None:
    monkeypatch.setattr(constant_tensors, "MAX_BYTES", most)
    hashed, constants = hashes(monkeypatch), ConstantTensors()
    for text in (1.0, 10.0, 1.0):
        constants.describe(TWO, inputs(text=text))
    assert hashed.call_count == 4 + again


def test_what_no_recent_request_had_is_forgotten(monkeypatch) -> None:
    hashed, constants = hashes(monkeypatch), ConstantTensors()
    for text in (1.0, *[10.0] * MOST, 1.0):
        constants.describe(TWO, inputs(text=text))
    assert hashed.call_count == 6
    assert len(constants._known) == 4


def test_shape_and_dtype_are_part_of_a_digest() -> None:
    tensors = inputs()
    text = tensors["0.encoder_hidden_states"]
    variants = (text, text.reshape(1, 8, 5), text.view(torch.int32), text.half())
    found = [
        digests(ConstantTensors().describe(TWO, {**tensors, "0.encoder_hidden_states": each})) for each in variants
    ]
    assert len({each["0.encoder_hidden_states"] for each in found}) == len(variants)


def test_equal_tensors_are_sent_once() -> None:
    tensors = inputs()
    tensors["1.encoder_hidden_states"] = tensors["0.encoder_hidden_states"].clone()
    metas = ConstantTensors().describe(TWO, tensors)
    assert [meta.name for meta in metas if is_sent(meta, ())] == [
        "0.hidden_states", "0.timestep", "0.encoder_hidden_states",
    ]  # fmt: skip
    assert {meta.name: meta.same for meta in metas if meta.same} == {
        f"1.{name}": f"0.{name}" for name in ("hidden_states", "timestep", "encoder_hidden_states")
    }


def test_tensors_that_look_alike_are_sent() -> None:
    tensors = inputs()
    tensors["1.hidden_states"] = tensors["1.hidden_states"] + 1e-6
    tensors["1.timestep"] = tensors["1.timestep"].double().float() * 0 + 7.0
    assert not [meta.same for meta in ConstantTensors().describe(TWO, tensors) if meta.same]


def test_other_requests_send_all() -> None:
    (meta,) = ConstantTensors().describe(Decode(model=MODEL), {"latent": torch.zeros(1, 4, 3, 3)})
    assert (meta.digest, meta.same) == ("", "")
