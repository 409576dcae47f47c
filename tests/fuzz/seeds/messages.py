"""Inputs of the targets for messages: a good one of each message, and one for each refusal."""

from typing import Any

import msgspec

from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.machines.nodes import host_control
from parallel_backend.progress import RankProgress
from parallel_backend.protocol import frames, messages, rank_control
from parallel_backend.protocol.frames import Frame, TensorMeta, pack
from parallel_backend.protocol.hosts import HostInfo, JoinHost, OpenStore, StorePort
from parallel_backend.protocol.model_spec import Adapter, Devices, ModelSpec, Overlay
from parallel_backend.protocol.origin import Origin
from parallel_backend.protocol.status import LoadedModel, RankStatus, SpareStatus, Status, StatusQuery, Work
from parallel_backend.step_cache.settings import StepCache
from tests.support.refused_headers import HEADERS, PREFIXES, REQUESTS, header

Seeds = dict[str, bytes]
PREFIX = frames.PREFIX.size

SPEC = ModelSpec(
    path="/m", stamp="s", devices=Devices(kind="cuda", indices=(0, 1), visible=(("CUDA_VISIBLE_DEVICES", "0,1"),)),
    layout=ParallelLayout(ring=2, stale="previous", balance=(2.0, 1.0)),
)  # fmt: skip
CPU = ModelSpec(path="/m", devices=Devices(kind="cpu", indices=(0, 1)))
ADAPTER, OVERLAY = Adapter(path="/a", id="a", strength=0.5), Overlay(path="/o", id="o")
HOST = HostInfo(name="b", node=1, address="10.0.0.2", devices=CPU.devices, versions={"torch": "2"})
MODEL = LoadedModel(path="/m", layout=ParallelLayout(), dtype="float32", parts=("vae",), loads=1, note="n")
RANK = RankStatus(
    rank=0, pid=2, device="cpu", memory=1, models=(MODEL,), progress=RankProgress(phase="sampling", steps=2),
    device_name="CPU", device_used=1, device_total=2, load=0.5,
)  # fmt: skip
STATUS = Status(
    pid=1, protocol=2, generation=1, state="busy", running="a", queued=("b",), layout=SPEC.layout, idle_timeout=1.0,
    memory=1, ranks=(RANK,), work=Work(kind="Sample", origin=Origin(prompt="p", node="3")),
)  # fmt: skip
X = TensorMeta(name="x", dtype="float32", shape=(1, 2))
GOOD: tuple[Any, ...] = (
    messages.Forward(model=SPEC, request_id="a", branches=2, skipped=((1,), ()), adapters=((ADAPTER,), ())),
    messages.Sample(
        model=SPEC, request_id="a", branches=1, sampler="euler", cfg=1.5, overlay=OVERLAY, cache=StepCache(interval=2)
    ),
    messages.EncodeText(model=CPU, request_id="a", adapters=(ADAPTER,)),
    messages.Decode(model=CPU, request_id="a", tile=8, origin=Origin(prompt="p", node="3")),
    messages.Encode(model=CPU, request_id="a", dtype="bfloat16"),
    messages.ReadWeights(model=CPU, request_id="a", component="vae", names=("a", "b")),
    messages.Unload(model=CPU, request_id="a"),
    messages.Trial(name="exchange", model=CPU, request_id="a", amount=4),
    messages.Expect(devices=CPU.devices),
    messages.Cancel(request_id="a"),
    messages.Outcome(request_id="a"),
    StatusQuery(),
    messages.Stop(),
    messages.Step(),
    messages.Continue(),
    messages.Done(),
    messages.Progress(phase="sampling", value=1, total=2),
    messages.Error(code="protocol", message="no"),
    messages.Files(),
    JoinHost(host=HOST),
    OpenStore(generation=1),
    StorePort(port=2),
    STATUS,
)
assert {type(message) for message in GOOD} == set(messages.MESSAGES.values())


def accepted() -> dict[str, Seeds]:
    """Return inputs that are accepted, by target and name."""
    named = {type(message).__name__: pack(Frame(message=message, tensors=(X,), program="p")) for message in GOOD}
    control: tuple[Any, ...] = (
        rank_control.Run(header=msgspec.Raw(named["Trial"][PREFIX:])),
        rank_control.CancelRun(request_id="a"),
        rank_control.GiveWay(request_id="a"),
        rank_control.Prepared(),
        rank_control.Ready(),
        rank_control.Heartbeat(status=RANK),
        rank_control.Finished(request_id="a", code="done"),
    )
    to_rank = (rank_control.Run, rank_control.CancelRun, rank_control.GiveWay)
    sent = {type(each).__name__: bytes([not isinstance(each, to_rank)]) + msgspec.json.encode(each) for each in control}
    return {
        "message": {name: packed[PREFIX:] for name, packed in named.items()},
        "control": sent,
        "agent": _of_agents(),
        "stream": {
            "nothing": b"",
            "byte_by_byte": b"\0" + named["Done"],
            "whole": b"\xff" + named["Cancel"],
            "two": b"\x40" + named["Done"] + named["Unload"],
        },
    }


AGENTS: tuple[Any, ...] = (
    host_control.StartRank(key=1, generation=2, device="cpu", collectives="gloo", ranks=1, environment={"RANK": "1"}),
    host_control.KillRank(key=1),
    host_control.Ping(number=3, idle=True),
    host_control.RankStarted(key=1, pid=4, was_spare=False),
    host_control.RankSaid(key=1, message=msgspec.Raw(b'{"type":"Ready"}')),
    host_control.RankWrote(key=1, text="x"),
    host_control.RankExited(key=1, returncode=-9),
    host_control.Report(
        number=3,
        time=1.0,
        ranks={1: host_control.RankActivity(memory=1, cpu_ticks=2, busy=True)},
        spares=(SpareStatus(pid=5, memory=1, ready=True),),
    ),
)


def _framed(body: bytes) -> bytes:
    return len(body).to_bytes(4, "big") + body


def _of_agents() -> Seeds:
    to_host = (host_control.StartRank, host_control.KillRank, host_control.Ping)
    return {
        type(each).__name__: bytes([not isinstance(each, to_host)]) + _framed(msgspec.json.encode(each))
        for each in AGENTS
    } | {"two": b"\0" + 2 * _framed(msgspec.json.encode(AGENTS[2])), "part": b"\0\0\0"}


def refused() -> dict[str, Seeds]:
    """Return inputs that are refused, by target and what is wrong with them."""
    wrong = msgspec.to_builtins(STATUS) | {"memory": 10**4000}
    return {
        "message": {name: sent for name, (sent, _) in (HEADERS | REQUESTS).items()}
        | {"memory": header("Status", wrong)},
        "control": _refused_control(),
        "agent": _refused_agents(),
        "stream": {name: b"\x0f" + sent for name, (sent, _) in PREFIXES.items()}
        | {"cut_off": b"\x0f" + frames.PREFIX.pack(frames.MAGIC, frames.VERSION, 100) + b"{"},
    }


def _refused_agents() -> Seeds:
    return {
        "long": b"\0\xff\xff\xff\xff",
        "no_json": b"\0" + _framed(b"{"),
        "nested": b"\1" + _framed(b'{"type":"Report","a":' + b"[" * 1200),
        "direction": b"\0" + _framed(b'{"type":"RankStarted","key":1,"pid":2}'),
        "empty": b"\1" + _framed(b""),
    }


def _refused_control() -> Seeds:
    return {
        "no_json": b"\0{",
        "nested": b"\1" + b'{"type":"Heartbeat","a":' + b"[" * 1200,
        "direction": b'\0{"type":"Ready"}',
        "header": b'\0{"type":"Run","header":{"type":"Exec"}}',
        "truncated": b"\1" + b"x" * 64,
        "empty": b"\0",
    }
