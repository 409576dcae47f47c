"""What the ranks measure of their machine for one model and size, in a few seconds, all at the same time.

A block of each kind computes on random numbers with each rank's share of the tokens, so what is measured holds for the
layers, kernels and host of this machine. Attention and exchanges are measured apart, since layouts differ in them.
"""

from collections.abc import Mapping, Sequence
from functools import partial as partial_of

import msgspec
import torch
from torch import Tensor

from ..attention.kernels import AUTO, KERNELS, Kernel, choose
from ..distributed.collectives import gather_texts, start_all_to_all, wait_all
from ..distributed.mesh import Axis
from ..distributed.rank_speeds import paces
from ..errors import InvalidRequest
from ..families.modules import module_class_of
from ..families.registry import family_of
from ..interfaces.family import Family
from ..interfaces.state import State
from ..loading import partial
from ..loading.room import room_on
from ..progress import PROGRESS
from ..protocol.messages import Trial
from . import layer_curve
from .hardware.description import Curve, Device, Hardware, Link, parse, text
from .layers import kind_of
from .timing import LEAST, seconds_of, usual

NAME = "probe"
"""The name of the trial."""
REQUEST, REPLY = "request", "hardware"
"""Names of the tensors: JSON as bytes."""
MAX_REQUEST = 1 << 20

_EXCHANGES = 20
"""Most rounds of an exchange, which is short and varies most."""
_LARGEST = 32 << 20
"""Most bytes that a rank sends in an exchange that is measured."""
_STREAM = 64 << 20
_REPEATED = 1 << 20
"""Random numbers that stand for weights again and again: to draw as many as there are takes seconds."""


class ProbeRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be measured.

    Attributes:
        class_name: of the transformer's module.
        config: of the module.
        shapes: of the inputs of one sample.
        dtype: of weights and activations.
        name: of the machine, for people.
        device_names: of the devices, by rank.
        hosts: numbers of adjacent devices of one host.
        attention: the kernel's name, as the request has it.
    """

    class_name: str
    config: dict[str, object]
    shapes: dict[str, tuple[int, ...]]
    dtype: str
    name: str
    device_names: tuple[str, ...]
    hosts: tuple[int, ...] = ()
    attention: str = AUTO


def run(_message: Trial, tensors: Mapping[str, Tensor], world: Axis, device: torch.device) -> dict[str, Tensor]:
    """Measure this machine. Every rank takes part; rank 0 has the tensors, and returns the hardware as JSON.

    Raises:
        InvalidRequest: the request is wrong. On every rank alike.
    """
    asked = _passed_on(tensors, world)
    try:
        request = msgspec.json.decode(asked.encode(), type=ProbeRequest)
        dtype = getattr(torch, request.dtype)
        family_of(request.class_name).extent(request.config, request.shapes)
        if len(request.device_names) != world.size or not isinstance(dtype, torch.dtype):
            raise InvalidRequest(f"a probe of {len(request.device_names)} devices by {world.size} ranks")
    except (msgspec.MsgspecError, ValueError, AttributeError, KeyError) as error:
        raise InvalidRequest(f"a probe that nobody understands: {error}") from error
    hardware = measure(request, world, device)
    return {} if world.index else {REPLY: _bytes(text(hardware))}


def measure(request: ProbeRequest, world: Axis, device: torch.device) -> Hardware:
    """Measure this machine, together with all ranks; return the same on every rank."""
    dtype: torch.dtype = getattr(torch, request.dtype)
    with PROGRESS.phase("measuring the machine"):
        mine, before = _device(request, world, device, dtype), paces(device, world.size)
        links = _links(request, world, device, dtype)
        now = tuple(map(max, before, paces(device, world.size)))  # something may have disturbed one of them
        launch, streaming = _launch(device), _streaming(device)
    described = [msgspec.json.decode(each.encode(), type=Device) for each in gather_texts(_json(mine), world)]
    hardware = Hardware(
        name=request.name, devices=tuple(described), links=links, hosts=request.hosts, launch=launch,
        streaming=streaming, host_memory=float(room_on(torch.device("cpu"), 0).free), paces=now if all(now) else (),
    )  # fmt: skip
    return parse(gather_texts(text(hardware).decode(), world)[0].encode(), "what rank 0 has measured")


def asked_by(request: ProbeRequest) -> dict[str, Tensor]:
    """Return the tensors of a probe's request."""
    return {REQUEST: _bytes(msgspec.json.encode(request))}


def answered(reply: Mapping[str, Tensor]) -> Hardware:
    """Return the hardware in a probe's reply."""
    return parse(bytes(reply[REPLY].tolist()), "the ranks' answer")


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _json(device: Device) -> str:
    return msgspec.json.encode(device).decode()


def _passed_on(tensors: Mapping[str, Tensor], world: Axis) -> str:
    """Return the request, which rank 0 alone has."""
    given = tensors.get(REQUEST)
    mine = "" if given is None or given.numel() > MAX_REQUEST else bytes(given.tolist()).decode(errors="replace")
    return gather_texts(mine, world)[0]


def _device(request: ProbeRequest, world: Axis, device: torch.device, dtype: torch.dtype) -> Device:
    family = _with_numbers(request, device, dtype)
    inputs = {name: _random(name, shape, dtype, device) for name, shape in request.shapes.items()}
    with torch.inference_mode():
        layers, alone, balanced, states = layer_curve.measured(family, inputs, world, device)
        attends = _attends(family, states, world, _kernel(request.attention, family, device, dtype), dtype)
        matrix, attention = _matrix(family, states, device, dtype), _rate(attends)
        bandwidth, room = _bandwidth(device), room_on(device, 0)
    return Device(
        name=request.device_names[world.index], matrix=matrix, attention=attention,
        memory=float(room.free + room.freeable), bandwidth=bandwidth, alone=alone, fresh=_fresh(device, world),
        layers=layers, attends=attends, balanced=balanced,
    )  # fmt: skip


def _with_numbers(request: ProbeRequest, device: torch.device, dtype: torch.dtype) -> Family:
    """Return a family of which a block of each kind, and what is around the blocks, have random numbers."""
    module = partial.empty(module_class_of(request.class_name), request.config, dtype)
    family = family_of(request.class_name)(module.eval().requires_grad_(False))
    kinds, repeated = set[tuple[object, ...]](), torch.randn(_REPEATED, device=device) * 0.02
    inside = {part for block in family.blocks for each in block.modules for part in each.modules()}
    filled = [part for part in module.modules() if part not in inside]
    for block in family.blocks:
        if (kind := kind_of(block)) not in kinds:
            kinds.add(kind)
            filled += [part for each in block.modules for part in each.modules()]
    for part in filled:
        for name, parameter in part.named_parameters(recurse=False):
            numbers = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            for some in numbers.view(-1).split(_REPEATED):
                some.copy_(repeated[: len(some)])
            setattr(part, name, torch.nn.Parameter(numbers, requires_grad=False))
        for name, buffer in part.named_buffers(recurse=False):
            setattr(part, name, buffer.to(device))
    return family


def _random(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if name.endswith("_labels"):
        return torch.zeros(shape, dtype=torch.int64, device=device)
    if name.endswith("_mask"):
        return torch.ones(shape, dtype=torch.bool, device=device)
    if name.endswith("timestep"):
        return torch.full(shape, 500.0, device=device)
    return torch.randn(shape, dtype=torch.float32).to(device, dtype)


def _kernel(name: str, family: Family, device: torch.device, dtype: torch.dtype) -> Kernel:
    """Return the kernel of this rank. One that cannot be used is refused with the request, on all ranks alike."""
    try:
        return choose(name, device, dtype, {site.head_dim for site in family.geometry.sites})
    except InvalidRequest:
        return KERNELS["sdpa"]


def _attends(family: Family, state: State, world: Axis, kernel: Kernel, dtype: torch.dtype) -> Curve:
    """Return the seconds of attention with some of the heads and tokens, by its operations."""
    points, any_tokens = dict[float, float](), next(iter(state.streams.values()))
    rows, device = len(any_tokens), any_tokens.device
    for site in family.geometry.sites:
        if site.queries is not None or any(name not in state.streams for name in site.streams):
            continue
        tokens = sum(state.streams[name].shape[1] for name in site.streams)
        shares = {(-(-site.heads // n), tokens) for n in range(1, world.size + 1)}
        shares |= {(site.heads, -(-tokens // n)) for n in range(1, world.size + 1)}
        for heads, part in sorted(shares):
            q = torch.randn(rows, heads, part, site.head_dim, device=device).to(dtype)
            operations = 4.0 * rows * heads * part * part * site.head_dim
            taken = usual(partial_of(kernel, q, q, q, None), world)
            points[operations] = min(taken, points.get(operations, taken))
    return tuple(sorted(points.items()))


def _rate(attends: Curve) -> float:
    return max((operations / taken for operations, taken in attends), default=1.0)


def _matrix(family: Family, state: State, device: torch.device, dtype: torch.dtype) -> float:
    tokens = max(each.shape[1] for each in state.streams.values())
    width = max(each.shape[2] for each in state.streams.values())
    a, b = (torch.randn(*shape, device=device).to(dtype) for shape in ((tokens, width), (width, width)))
    return 2.0 * tokens * width * width / seconds_of(lambda: a @ b)


def _bandwidth(device: torch.device) -> float:
    source = torch.zeros(_STREAM, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2.0 * _STREAM / seconds_of(lambda: target.copy_(source))


def _fresh(device: torch.device, world: Axis) -> float:
    """Return the bytes of new memory that a CPU rank writes in a second. A GPU's is kept, and given out again."""
    if device.type != "cpu":
        return 0.0
    return _STREAM / usual(lambda: torch.empty(_STREAM, dtype=torch.uint8).fill_(1), world)


def _launch(device: torch.device) -> float:
    """Return the seconds that the host takes for one small operation. A CPU rank's own work includes them."""
    if device.type == "cpu":
        return 0.0
    x = torch.zeros(8, device=device)
    return seconds_of(lambda: [x.add_(1) for _ in range(100)]) / 100


def _streaming(device: torch.device) -> float:
    pinned = torch.zeros(_STREAM, dtype=torch.uint8, pin_memory=device.type == "cuda")
    return _STREAM / seconds_of(lambda: pinned.to(device, copy=True))


def _links(request: ProbeRequest, world: Axis, device: torch.device, dtype: torch.dtype) -> tuple[Link, ...]:
    """Measure exchanges in each group that a layout may have."""
    tokens = max(max(shape[1:], default=1) for shape in request.shapes.values())
    amount = max(min(_LARGEST, tokens * 4096 * dtype.itemsize), 1 << 20) // 4
    found = []
    for groups in _groups(world.size):
        size, mine = len(groups[0]), next((group for group in groups if world.index in group), ())
        part, index = amount // size, mine.index(world.index) if mine else 0
        latency = _exchange(1, mine, mine, world, device)
        bandwidth = _rate_of(size, part, _exchange(part, mine, mine, world, device), latency)
        around = 0.0
        if size > 2:  # two send to each other in any case
            to, source = ((mine[(index + step) % size],) if mine else () for step in (1, -1))
            around = _rate_of(size, part, _exchange((size - 1) * part, to, source, world, device), latency)
        found += [
            Link(devices=each, bandwidth=bandwidth, latency=max(latency, LEAST), together=True, around=around)
            for each in groups
        ]
    return tuple(found)


def _rate_of(size: int, part: int, seconds: float, latency: float) -> float:
    """Return the bytes a second of each rank of a group that has sent a part to each other one, or as much to one."""
    return 4 * part * (size - 1) / max(seconds - latency, 0.1 * seconds, LEAST)


def _groups(ranks: int) -> list[list[tuple[int, ...]]]:
    """Return groups that exchange something at the same time: those of an axis of all ranks, and the first ranks."""
    found = []
    for size in range(2, ranks + 1):
        if ranks % size:
            found.append([tuple(range(size))])
            continue
        for stride in (each for each in range(1, ranks // size + 1) if ranks // size % each == 0):
            starts = [start for start in range(ranks) if start // stride % size == 0]
            found.append([tuple(range(start, start + size * stride, stride)) for start in starts])
    return found


def _exchange(values: int, to: Sequence[int], source: Sequence[int], world: Axis, device: torch.device) -> float:
    """Return the seconds in which every rank sends so many float32 to some ranks, and receives as many from others."""
    sending, receiving = ([values if rank in ranks else 0 for rank in range(world.size)] for ranks in (to, source))
    sent, received = (torch.zeros(sum(sizes), device=device) for sizes in (sending, receiving))

    def exchange() -> None:
        wait_all(start_all_to_all(sent, sending, received, receiving, world))

    return _slowest(usual(exchange, world, most=_EXCHANGES), world)


def _slowest(seconds: float, world: Axis) -> float:
    return max(map(float, gather_texts(repr(seconds), world)))
