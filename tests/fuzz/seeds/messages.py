"""Inputs of the targets for messages: a good one of each message, and one for each refusal."""

import json
from typing import Any

import msgspec

from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.machines.nodes import host_control
from parallel_backend.progress import RankProgress
from parallel_backend.protocol import frames, messages, rank_control
from parallel_backend.protocol.frames import Frame, TensorMeta, pack
from parallel_backend.protocol.hosts import HostInfo, JoinHost, OpenStore, StorePort
from parallel_backend.protocol.model_spec import Adapter, Devices, ModelSpec, Overlay
from parallel_backend.protocol.status import LoadedModel, RankStatus, SpareStatus, Status, StatusQuery

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
    rank=0, pid=2, device="cpu", memory=1, models=(MODEL,), progress=RankProgress(phase="sampling", steps=2)
)
STATUS = Status(
    pid=1, protocol=2, generation=1, state="busy", running="a", queued=("b",), layout=SPEC.layout, idle_timeout=1.0,
    memory=1, ranks=(RANK,),
)  # fmt: skip
X = TensorMeta(name="x", dtype="float32", shape=(1, 2))
GOOD: tuple[Any, ...] = (
    messages.Forward(model=SPEC, request_id="a", branches=2, skipped=((1,), ()), adapters=((ADAPTER,), ())),
    messages.Sample(model=SPEC, request_id="a", branches=1, sampler="euler", cfg=1.5, overlay=OVERLAY),
    messages.EncodeText(model=CPU, request_id="a", adapters=(ADAPTER,)),
    messages.Decode(model=CPU, request_id="a", tile=8),
    messages.Encode(model=CPU, request_id="a"),
    messages.ReadWeights(model=CPU, request_id="a", component="vae", names=("a", "b")),
    messages.Unload(model=CPU, request_id="a"),
    messages.Trial(name="exchange", model=CPU, request_id="a", amount=4),
    messages.Cancel(request_id="a"),
    messages.Outcome(request_id="a"),
    StatusQuery(),
    messages.Stop(),
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
        rank_control.Prepared(),
        rank_control.Ready(),
        rank_control.Heartbeat(status=RANK),
        rank_control.Finished(request_id="a", code="done"),
    )
    to_rank = (rank_control.Run, rank_control.CancelRun)
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


def _header(kind: str = "Done", body: Any = None, tensors: Any = ()) -> bytes:
    return json.dumps({"type": kind, "body": body or {}, "tensors": tensors}).encode()


def _tensor(**changes: Any) -> bytes:
    return _header(tensors=[{"name": "x", "dtype": "float32", "shape": [1], **changes}])


def _model(**changes: Any) -> bytes:
    model = {"path": "/m", "devices": {"kind": "cpu", "indices": [0, 1]}, **changes}
    return _header("Unload", {"model": model, "request_id": "a"})


def _layout(**degrees: Any) -> bytes:
    return _model(layout=degrees)


def _devices(**changes: Any) -> bytes:
    return _model(devices={"kind": "cpu", "indices": [0, 1], **changes})


def refused() -> dict[str, Seeds]:
    """Return inputs that are refused, by target and what is wrong with them."""
    return {
        "message": _refused_headers() | _refused_models() | _refused_layouts(),
        "control": _refused_control(),
        "agent": _refused_agents(),
        "stream": _refused_stream(),
    }


def _refused_headers() -> Seeds:
    return {
        "no_json": b"{",
        "memory": _header("Status", msgspec.to_builtins(STATUS) | {"memory": 10**4000}),
        "not_utf8": b'{"type":"\xff"}',
        "nested": b'{"a":' + b"[" * 1200,
        "unknown": _header("Exec"),
        "body": _header("Cancel", {"request_id": 1}),
        "dtype": _tensor(dtype="float64"),
        "negative": _tensor(shape=[-1]),
        "nine_dims": _tensor(shape=[1] * 9),
        "name": _tensor(name="a\n"),
        "bytes": _tensor(shape=[1 << 37, 2]),
        "twice": _header(tensors=json.loads(_tensor())["tensors"] * 2),
        "too_many": _header(tensors=[{"name": str(i), "dtype": "bool", "shape": []} for i in range(257)]),
        "id": _header("Unload", {"model": json.loads(_model())["body"]["model"], "request_id": "a\n"}),
    }


def _refused_models() -> Seeds:
    """Models with what belongs to them: files, adapters, devices."""
    adapter = {"path": "a\0", "id": "a", "strength": 1.0}
    body = {"model": json.loads(_model())["body"]["model"], "adapters": [adapter]}
    overlay = {**body, "adapters": [], "overlay": {"path": "a\0", "id": "a"}}
    return {
        "path": _model(path="a\0"),
        "adapter": _header("EncodeText", body),
        "overlay": _header("EncodeText", overlay),
        "many_devices": _devices(indices=[0] * 65),
        "no_device": _devices(indices=[]),
        "device": _devices(indices=[-1]),
        "hosts": _devices(hosts=["", "b", "b"]),
        "first_host": _devices(hosts=["b", ""]),
        "host_name": _host(name="a b"),
        "host_number": _host(node=0),
        "visible": _devices(kind="cuda", visible=[["CUDA_VISIBLE_DEVICES", "\0"]]),
    }


def _host(**changes: Any) -> bytes:
    return _header("JoinHost", {"host": msgspec.to_builtins(HOST) | changes})


def _refused_agents() -> Seeds:
    return {
        "long": b"\0\xff\xff\xff\xff",
        "no_json": b"\0" + _framed(b"{"),
        "nested": b"\1" + _framed(b'{"type":"Report","a":' + b"[" * 1200),
        "direction": b"\0" + _framed(b'{"type":"RankStarted","key":1,"pid":2}'),
        "empty": b"\1" + _framed(b""),
    }


def _refused_layouts() -> Seeds:
    return {
        "degree": _layout(ulysses=0),
        "large_degree": _layout(ulysses=10**12),
        "warmup": _layout(warmup=-1),
        "stale": _layout(stale="x"),
        "speed": _layout(pipe=2, balance=[0.0, 1.0]),
        "ranks": _layout(cfg=3),
        "combination": _layout(shard_weights=True),
        "balance": _layout(ulysses=2, balance=[1.0, 2.0]),
        "speeds": _layout(pipe=2, balance=[1.0]),
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


def _refused_stream() -> Seeds:
    prefix = frames.PREFIX.pack
    return {
        "magic": b"\x0fpDiT" + bytes(6),
        "version": b"\x0f" + prefix(frames.MAGIC, 1, 9),
        "length": b"\x0f" + prefix(frames.MAGIC, frames.VERSION, (1 << 32) - 1),
        "no_length": b"\x0f" + prefix(frames.MAGIC, frames.VERSION, 0),
        "cut_off": b"\x0f" + prefix(frames.MAGIC, frames.VERSION, 100) + b"{",
    }
