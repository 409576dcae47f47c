"""The numbers of a device's memory, what is planned to go there, and the refusal of what does not fit."""

from dataclasses import replace

import psutil
import pytest
import torch

from parallel_backend import env, processes
from parallel_backend.checkpoint.opening import open_checkpoint
from parallel_backend.errors import InvalidRequest
from parallel_backend.loading import load, room, transformer_part
from parallel_backend.loading.room import Claim, Room, check_fits, memory_limit, room_on, shortage
from parallel_backend.protocol.messages import EncodeText
from tests.support import tiny
from tests.unit.conftest import one_rank
from tests.unit.loading.test_loading import ALONE

GB = 10**9
TEXT = {"ids": torch.tensor([[3, 4, 1]]), "lengths": torch.tensor([3])}


def gpu(needed, free, freeable, *, index=0, total=24, limit=24):
    """A claim in GB on a GPU; -1 is the machine's memory."""
    numbers = {"needed": needed, "free": free, "freeable": freeable, "total": total, "limit": limit}
    return Claim(device=index, **{name: int(number * GB) for name, number in numbers.items()})


def test_a_gpu_has_free_what_torch_keeps_without_using_it(monkeypatch):
    device = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", {device: (5 * GB, 24 * GB)}.__getitem__)
    monkeypatch.setattr(torch.cuda, "memory_reserved", {device: 9 * GB}.__getitem__)
    monkeypatch.setattr(torch.cuda, "memory_allocated", {device: 7 * GB}.__getitem__)
    measured = room_on(device, 0)
    assert measured == Room(free=7 * GB, freeable=7 * GB, total=24 * GB, limit=24 * GB)
    assert measured.left == 7 * GB
    assert room.claim(device, measured, 3).device == 1
    monkeypatch.setenv(env.MEMORY_LIMIT.name, "12GB")
    assert room_on(device, 0).left == 5 * GB


def test_a_cpu_rank_has_the_machines_memory_or_its_limit(monkeypatch):
    device, memory = torch.device("cpu"), psutil.virtual_memory()
    measured = room_on(device, 3)
    assert (measured.total, measured.limit, measured.freeable) == (memory.total, memory.total, 3)
    assert measured.free == pytest.approx(memory.available, rel=0.2)
    monkeypatch.setenv(env.MEMORY_LIMIT.name, "5 mb")
    assert room_on(device, 1_000_000).left == 4_000_000


@pytest.mark.parametrize(("text", "limit"), [("", 100), ("7", 7), ("0.05KB", 50), ("2GB", 100)])
def test_a_limit_is_a_number_of_bytes_with_or_without_a_unit(monkeypatch, text, limit):
    monkeypatch.setenv(env.MEMORY_LIMIT.name, text)
    assert memory_limit(100) == limit


@pytest.mark.parametrize("text", ["much", "0", "-1", "2GiB", "1e9", "nan"])
def test_another_limit_is_refused(monkeypatch, ask, checkpoint, text):
    monkeypatch.setenv(env.MEMORY_LIMIT.name, text)
    with pytest.raises(InvalidRequest, match=rf"^PARALLEL_DIT_MEMORY_LIMIT={text}: write .* such as 20GB$"):
        ask(EncodeText(model=one_rank(checkpoint)), TEXT)


def test_the_sentence_names_rank_device_numbers_and_remedies():
    claims = [gpu(23.8, 24, 0), gpu(23.8, 10, 1.2, index=1)]
    with pytest.raises(InvalidRequest) as refused:
        check_fits(claims, "flux.safetensors", dtype=torch.bfloat16, remedy="share them")
    assert str(refused.value) == (
        "rank 1 (cuda:1) has room for 11.2 of 24.0 GB, and its weights of flux.safetensors take 23.8 GB: "
        "end other programs that use this memory, share them, or choose a smaller model"
    )


def test_ranks_on_different_hosts_share_no_memory():
    two = [gpu(12, 13, 0, index=index) for index in (0, 0)]
    found = shortage(two)
    assert found is not None
    assert found.needed == 24 * GB
    assert shortage([two[0], replace(two[1], host=9)]) is None


def test_ranks_of_one_memory_share_it():
    claims = [gpu(9, 12, 1, index=-1), gpu(7, 12, 1, index=-1), gpu(0, 12, 9, index=-1)]
    with pytest.raises(InvalidRequest) as refused:
        check_fits([*claims[:1], gpu(20, 12, 1, index=-1), *claims[2:]], "m", dtype=torch.float32, remedy="share them")
    assert str(refused.value) == (
        "ranks 0 and 1 (cpu) have room for 14.0 of 24.0 GB, and their weights of m take 29.0 GB: "
        "share them, choose dtype bf16, or choose a smaller model"
    )
    with pytest.raises(InvalidRequest, match=r"ranks 0 and 1 \(cpu\) have room for 14\.0"):
        check_fits(claims, "m", dtype=torch.float32, remedy="")
    check_fits([gpu(9, 12, 1, index=-1), gpu(5, 12, 1, index=-1)], "m", dtype=torch.float32, remedy="")


def test_the_limit_is_that_of_one_rank():
    claims = [gpu(3, 12, 1, index=-1, limit=3.5), gpu(3.6, 12, 1, index=-1, limit=3.5)]
    with pytest.raises(InvalidRequest) as refused:
        check_fits(claims, "m", dtype=torch.bfloat16, remedy="share them")
    assert str(refused.value) == (
        "rank 1 (cpu) has room for 3.5 GB by PARALLEL_DIT_MEMORY_LIMIT, and its weights of m take 3.6 GB: "
        "raise PARALLEL_DIT_MEMORY_LIMIT, share them, or choose a smaller model"
    )
    check_fits([claims[0], claims[0]], "m", dtype=torch.bfloat16, remedy="")


@pytest.mark.parametrize("claims", [[gpu(10, 10, 0)], [gpu(10, 1, 9)], [gpu(0, 0, 0)], [gpu(9, 10, 0), gpu(2, 9, 2)]])
def test_what_fits_once_everything_is_freed_is_not_refused(claims):
    check_fits(claims, "m", dtype=torch.float32, remedy="")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_plan_takes_as_much_as_the_loaded_weights(checkpoint, dtype):
    files, device = open_checkpoint(checkpoint), torch.device("cpu")
    plan = transformer_part.plan_transformer(files, dtype, device, ALONE, "transformer")
    assert all(parameter.is_meta for parameter in plan.family.module.parameters())
    planned = plan.nbytes
    module = plan.fill().module
    assert planned == sum(each.nbytes for each in (*module.parameters(), *module.buffers()))
    encoder = load.load_text_encoder(files, dtype, device)
    assert load.text_encoder_bytes(files, dtype) == sum(each.nbytes for each in encoder.parameters())


def test_a_text_encoder_without_room_is_refused_before_anything_is_unloaded(
    ask, engine, checkpoint, tmp_path, monkeypatch
):
    ask(EncodeText(model=one_rank(checkpoint)), TEXT)
    before = engine.snapshot()
    needed = load.text_encoder_bytes(open_checkpoint(checkpoint), torch.float32)
    monkeypatch.setenv(env.MEMORY_LIMIT.name, str(needed - 1))
    other = tiny.write(tmp_path / "other")
    with pytest.raises(InvalidRequest, match=r"^rank 0 \(cpu\) has .* other's text encoder take .* own loader"):
        ask(EncodeText(model=one_rank(other)), TEXT)
    assert engine.snapshot() == before


def test_other_models_leave_before_a_load_for_which_no_room_is_free(ask, engine, checkpoint, tmp_path, monkeypatch):
    ask(EncodeText(model=one_rank(checkpoint)), TEXT)
    needed = load.text_encoder_bytes(open_checkpoint(checkpoint), torch.float32)
    monkeypatch.setattr(processes, "machine_memory", lambda: (needed // 2, 1 << 50))
    other = tiny.write(tmp_path / "other")
    ask(EncodeText(model=one_rank(other)), TEXT)
    assert [model.path for model in engine.snapshot()[0]] == [str(other)]
