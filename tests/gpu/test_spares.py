"""A spare rank leaves the GPUs alone until it becomes a rank, and then works on one."""

import time
from pathlib import Path

import torch

from parallel_backend.client.client import Client
from parallel_backend.client.temporary_backend import temporary_backend
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.messages import Forward
from parallel_backend.protocol.model_spec import Devices, ModelSpec
from scripts.processes import wait_until
from tests.ranks.requests import Case
from tests.support import gpus, tiny

SMALL = 64 << 20
"""Bytes of a card; a process that works on one takes several times as much before its first tensor."""
CARD = Devices(kind="cuda", indices=(0, 0), visible=gpus.VISIBLE, collectives="gloo")


def ready(client: Client) -> set[int]:
    def pids() -> set[int]:
        spares = client.status().spares
        return {spare.pid for spare in spares if spare.ready} if len(spares) == 2 else set()

    return wait_until(lambda: found if len(found := pids()) == 2 else None, 180.0, "two spare ranks are ready")


def free_memory() -> int:
    return torch.cuda.mem_get_info(0)[0]


def test_a_spare_rank_takes_no_memory_of_a_card_before_it_is_a_rank(on_card, tmp_path: Path, monkeypatch) -> None:
    model = tiny.write(tmp_path / "model", tiny.Tiny(heads=3, vae=False))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    for name, value in gpus.VISIBLE:
        monkeypatch.setenv(name, value)
    spec = ModelSpec(path=str(model), devices=CARD, dtype="float32", layout=ParallelLayout(ulysses=2))
    before = on_card(free_memory)
    with temporary_backend(tmp_path, spares=2) as client:
        spares = ready(client)
        time.sleep(1.0)
        assert before - on_card(free_memory) < SMALL
        case = Case()
        reply = client.call(Forward(model=spec, branches=len(case.texts)), case.forward_inputs())
        assert {rank.pid for rank in client.status().ranks} == spares
        assert before - on_card(free_memory) > SMALL, "this is how it shows"
    assert all(torch.isfinite(prediction).all() for prediction in reply.values())
