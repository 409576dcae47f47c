"""GPUs without access to each other's memory are named in the rank's log. What torch reports is faked."""

import shutil
from collections import namedtuple

import pytest
import torch

from parallel_backend.distributed import peer_access

Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def cards(monkeypatch):
    """``cards({0, 1})`` are three GPUs, of which these reach each other."""

    def connect(group):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: {one, other} <= group)

    return connect


def test_peer_access_between_all_gpus_is_not_mentioned(cards, caplog):
    cards({0, 1, 2})
    peer_access.log_missing(torch.device("cuda", 1))
    assert not caplog.records


def test_gpus_out_of_reach_are_named_with_the_space_that_nccl_needs(cards, caplog, monkeypatch):
    cards({0, 1})
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(67_108_864, 0, 60_000_000))
    for index in range(3):
        peer_access.log_missing(torch.device("cuda", index))
    found = [record.getMessage() for record in caplog.records]
    assert [text.partition(": NCCL")[0] for text in found] == [
        "cuda:0 has no peer access to GPU 2",
        "cuda:1 has no peer access to GPU 2",
        "cuda:2 has no peer access to GPU 0 and 1",
    ]
    assert all("0.06 of 0.07 GB are free there; --shm-size in docker" in text for text in found)


def test_a_machine_without_shared_memory_is_told_so(cards, caplog, monkeypatch, tmp_path):
    cards(set())
    monkeypatch.setattr(peer_access, "SHARED", tmp_path / "missing")
    peer_access.log_missing(torch.device("cuda", 0))
    assert "which is missing here" in caplog.text
