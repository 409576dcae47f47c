"""A status as text, and as JSON."""

from dataclasses import replace

import msgspec

from parallel_backend.client.status_text import format_json, format_status
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.progress import RankProgress
from parallel_backend.protocol.origin import Origin
from parallel_backend.protocol.status import LoadedModel, RankStatus, SpareStatus, Status, Work

MODELS = (
    LoadedModel(path="/models/shapes", dtype="float32", parts=("transformer", "vae"), loads=2),
    LoadedModel(path="/proc/10/fd/7", dtype="bfloat16", parts=("vae",), loads=1),
)
RANK = RankStatus(rank=0, pid=12, device="cuda:0", memory=3 << 30, device_memory=5 << 20, models=MODELS, steps=40)
STATUS = Status(
    pid=11, protocol=1, generation=3, state="busy", running="abc", queued=("def", "ghi"),
    layout=ParallelLayout(cfg=2, ulysses=2), idle_timeout=600.0, memory=20 << 20, ranks=(RANK,),
    spares=(
        SpareStatus(pid=13, memory=7 << 20, ready=True), SpareStatus(pid=14, memory=1 << 20, ready=False, host="b"),
    ),
)  # fmt: skip


def test_a_status_as_text() -> None:
    text = format_status(STATUS)
    for words in (
        "pid 11, busy, 20 MiB, ends after 600 s without work",
        "cfg=2 ulysses=2",
        "abc",
        "def, ghi",
        "1, generation 3",
        "rank 0     pid 12, cuda:0, 3.00 GiB, 5 MiB on the device, 40 steps",
        "/models/shapes as float32: transformer, vae (loaded 2 times)",
        "spares       2\n  spare      pid 13, ready, 7 MiB\n  spare      pid 14 on b, starting, 1 MiB",
        "a copied model as bfloat16: vae (loaded once)",
    ):
        assert words in text
    assert "parts done" not in text
    assert "errors" not in text


def test_what_the_text_has_only_at_times() -> None:
    assert "errors       2 that should not have happened" in format_status(replace(STATUS, internal_errors=2))
    assert "listens" not in format_status(STATUS)
    assert "listens      10.0.0.1:7400\n" in format_status(replace(STATUS, listens="10.0.0.1:7400"))
    sampling = RankProgress(phase="sampling", step=2, steps=20, count=7, quiet=1.2)
    busy = format_status(replace(STATUS, ranks=(replace(RANK, progress=sampling),)))
    assert "40 steps, sampling (step 3 of 20), 7 parts done, progress 1 s ago" in busy


def test_the_text_says_which_node_asks_and_how_full_and_busy_a_device_is() -> None:
    work = Work(kind="Forward", origin=Origin(prompt="p-1", node="3"), model="/models/shapes")
    gauged = replace(RANK, device_used=30 << 30, device_total=80 << 30, load=0.5)
    text = format_status(replace(STATUS, work=work, ranks=(gauged,)))
    assert "running      abc, for node 3 of prompt p-1" in text
    assert "5 MiB on the device, 30.00 GiB of its 80.00 GiB in use, 50 % busy, 40 steps" in text
    assert "busy, 40" not in format_status(STATUS)
    assert "prompt" not in format_status(replace(STATUS, work=replace(work, origin=None)))


def test_a_status_as_json() -> None:
    displaced = replace(STATUS, layout=ParallelLayout(ring=2, stale="previous"))
    for shown, kind in ((STATUS, ""), (replace(STATUS, layout=None), ""), (displaced, "displaced patch")):
        assert msgspec.json.decode(format_json(shown))["approximation"] == kind
        assert msgspec.json.decode(format_json(shown), type=Status) == shown
