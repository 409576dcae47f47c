"""``Hardware``: what the planner knows of a machine, as numbers. A JSON file has the same form."""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from ...errors import InvalidRequest
from ...protocol.model_spec import MAX_RANKS

MAX_FILE = 1 << 20
"""Bytes of a description."""
MAX_DEVICES = 2 * MAX_RANKS

Curve = tuple[tuple[float, float], ...]
"""Measured points: where, and how many seconds."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU, or the cores of one CPU rank.

    Attributes:
        name: of its kind.
        matrix: operations a second that large matrix products reach, with numbers of the model's dtype.
        attention: the same of the attention kernel.
        memory: bytes that weights and tensors may take.
        bandwidth: bytes a second that its memory reads or writes.
        units: processors that share the tiles of a product; 1 if products of any size are equally fast.
        alone: how much faster it is while the other devices do nothing; more than 1 where they share a memory.
        fresh: bytes a second of memory that it has to be given anew, as for gathered weights on a CPU; 0 if that takes
            no time.
        layers: measured seconds of all layers of one model's forward without attention, by the share of the tokens.
            They take the place of what is predicted from the numbers above. Empty if nothing has been measured.
        attends: measured seconds of the attention of one model, by the number of its operations.
        balanced: measured shares of the tokens a second in those layers, beside the other devices and with a share in
            proportion to its speed; 0 if nobody measured that, as where devices are alike.
    """

    name: str
    matrix: float
    attention: float
    memory: float
    bandwidth: float
    units: int = 1
    alone: float = 1.0
    fresh: float = 0.0
    layers: Curve = ()
    attends: Curve = ()
    balanced: float = 0.0

    def __post_init__(self) -> None:
        for field in ("matrix", "attention", "memory", "bandwidth", "units", "alone"):
            _check_positive(f"{field} of device {self.name!r}", getattr(self, field))
        for field in ("fresh", "balanced"):
            if not 0 <= getattr(self, field) < math.inf:
                given = f"{field} of device {self.name!r} is {getattr(self, field):g}"
                raise InvalidRequest(f"{given}: 0 or more is needed")
        for field in ("layers", "attends"):
            for number in (number for point in getattr(self, field) for number in point):
                _check_positive(f"{field} of device {self.name!r}", number)


@dataclass(frozen=True, kw_only=True)
class Link:
    """What joins some devices. Of several links that join two devices, the one with the fewest devices carries.

    Attributes:
        devices: their numbers.
        bandwidth: bytes a second that one device sends to others.
        latency: seconds of an exchange of nothing.
        total: bytes a second that all its devices send together, such as through one network card; 0 for no limit.
        together: whether it carries all that exactly these devices exchange with each other, as a probe measures it.
        around: bytes a second that one device sends where each sends to the next of them alone; 0 for ``bandwidth``.
    """

    devices: tuple[int, ...]
    bandwidth: float
    latency: float
    total: float = 0.0
    together: bool = False
    around: float = 0.0

    def __post_init__(self) -> None:
        _check_positive("bandwidth of a link", self.bandwidth)
        _check_positive("latency of a link", self.latency)
        for name in ("total", "around"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InvalidRequest(f"{name}={getattr(self, name)} of a link: a number of at least 0 would work")
        if len(set(self.devices)) < 2:
            raise InvalidRequest(f"a link joins devices {list(self.devices)}: name two or more different ones")


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The devices of one or several hosts, and what joins them.

    Attributes:
        name: what a person calls it.
        devices: one for each rank, hosts one after another.
        links: what joins devices. Each pair has to be joined.
        hosts: numbers of adjacent devices of one host; empty if all are of one.
        launch: seconds that the host takes for each operation that it gives to a device.
        streaming: bytes a second that reach one device from its host's memory.
        files: bytes a second that a host reads from its page cache.
        host_memory: free bytes of a host's memory, from which blocks may stream.
        paces: how often a second each device computed something when all this was measured; empty if nobody noted it.
    """

    name: str
    devices: tuple[Device, ...]
    links: tuple[Link, ...] = ()
    hosts: tuple[int, ...] = ()
    launch: float = 6e-6
    streaming: float = 20e9
    files: float = 2e9
    host_memory: float = 64e9
    paces: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        count = len(self.devices)
        if not 1 <= count <= MAX_DEVICES:
            raise InvalidRequest(f"{self.name} has {count} devices: 1 to {MAX_DEVICES} would work")
        for field in ("streaming", "files"):
            _check_positive(f"{field} of {self.name}", getattr(self, field))
        for field in ("launch", "host_memory"):
            if not getattr(self, field) >= 0:
                raise InvalidRequest(f"{field}={getattr(self, field)} of {self.name}: at least 0 would work")
        if self.hosts and (sum(self.hosts) != count or min(self.hosts) < 1):
            raise InvalidRequest(f"the hosts of {self.name} have {list(self.hosts)} devices, and there are {count}")
        if self.paces and len(self.paces) != count:
            raise InvalidRequest(f"{self.name} has {len(self.paces)} paces: one for each of {count} devices would work")
        for pace in self.paces:
            _check_positive(f"a pace of {self.name}", pace)
        self._check_links()

    def _check_links(self) -> None:
        count = len(self.devices)
        for link in self.links:
            if not all(0 <= device < count for device in link.devices):
                raise InvalidRequest(f"{self.name} has a link of device {max(link.devices)} and {count} devices")
        for first in range(count):
            for second in range(first):
                if not any({first, second} <= set(link.devices) for link in self.links):
                    raise InvalidRequest(
                        f"no link of {self.name} joins devices {second} and {first}: add one of all devices"
                    )

    @property
    def cores(self) -> bool:
        """Whether the devices are CPU ranks, as measured: only there the host costs nothing apart."""
        return self.launch == 0

    @property
    def host_sizes(self) -> tuple[int, ...]:
        """Numbers of adjacent devices on one host."""
        return self.hosts or (len(self.devices),)

    def link(self, first: int, second: int, group: Collection[int] = ()) -> Link:
        """Return the link that carries what one device sends to another.

        Args:
            group: the devices that exchange something.
        """
        joining = [link for link in self.links if first in link.devices and second in link.devices]
        own = [link for link in joining if link.together and set(link.devices) == set(group)]
        return min(own or joining, key=lambda link: len(link.devices))

    def with_memory(self, memory: Sequence[float], host_memory: float) -> "Hardware":
        """Return the machine with other memory: of each device, and free on its hosts."""
        devices = tuple(replace(each, memory=most) for each, most in zip(self.devices, memory, strict=True))
        return replace(self, devices=devices, host_memory=host_memory)

    def first(self, count: int) -> "Hardware":
        """Return the machine without the devices after the first ``count``."""
        links = [_within(link, count) for link in self.links]
        sizes, left = list[int](), count
        for size in self.host_sizes:
            sizes += [min(size, left)] if left > 0 else []
            left -= size
        return Hardware(
            name=self.name, devices=self.devices[:count], links=tuple(link for link in links if link),
            hosts=tuple(sizes) if self.hosts else (), launch=self.launch, streaming=self.streaming, files=self.files,
            host_memory=self.host_memory, paces=self.paces[:count],
        )  # fmt: skip


def _within(link: Link, count: int) -> Link | None:
    devices = tuple(device for device in link.devices if device < count)
    if len(devices) < 2:
        return None
    return link if devices == link.devices else replace(link, devices=devices, together=False, around=0.0)


def read(path: Path) -> Hardware:
    """Return the description in a JSON file.

    Raises:
        InvalidRequest: it cannot be read, or is no description. The message says what is wrong, and where.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE + 1)
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}") from error
    if len(data) > MAX_FILE:
        raise InvalidRequest(f"{path} has more than {MAX_FILE} bytes, so it describes no machine")
    return parse(data, str(path))


def parse(data: bytes, what: str) -> Hardware:
    """Return the description in a JSON text. ``what`` names it in errors.

    Raises:
        InvalidRequest: it is no description.
    """
    try:
        return msgspec.json.decode(data, type=Hardware)
    except InvalidRequest:
        raise
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{what} describes no machine: {error}") from error


def text(hardware: Hardware) -> bytes:
    """Return a description as JSON."""
    return msgspec.json.format(msgspec.json.encode(hardware), indent=2) + b"\n"


def _check_positive(what: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise InvalidRequest(f"{what} is {value:g}: a number above 0 would work")
