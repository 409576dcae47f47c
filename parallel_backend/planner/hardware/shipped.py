"""Machines by name, described from datasheets and from measurements of single products, kernels and links.

No number here was fitted to a prompt's time. What each is made of:

- ``_DENSE``: 16-bit matrix products with 32-bit sums, without sparsity. NVIDIA's datasheets of H100, H20, L20, L40, RTX
  PRO 5000 Blackwell (AI TOPS / 8) and GB200 (NVL72's / 72), and the whitepapers of GA102 and AD102, appendix A (that
  of RTX 4090 D is RTX 4090's by their AI TOPS). Memory and processors come from the same pages.
- ``_REACHED``: the best measured product by stas00/ml-engineering, compute/accelerator, "Maximum Achievable Matmul
  FLOPS" at 744d01e. Where it has no measurement, ``_SHARE`` of the datasheet, the middle of its rows of NVIDIA.
- ``_FLASH2``: FlashAttention-2 reaches up to 73 % on A100 (https://arxiv.org/abs/2307.08691) and 35 % on H100
  (https://arxiv.org/abs/2407.08608), FlashAttention-3 up to 75 % on H100 (the same), FlashAttention-4 71 % on B200.
- Links: ring collectives reach 80 % of NVLink (the same repository, network/README). NCCL counts 24 GB/s for PCIe 4.0
  x16 and 10 GB/s between two sockets (its log in NVIDIA/nccl-tests issue 307), so 48 for PCIe 5.0, 12 for eight lanes.
- ``_LATENCY``: an exchange of nothing between two RTX 4090 takes 11.5 us (tinygrad/open-gpu-kernel-modules issue 17).
"""

from collections.abc import Callable, Mapping

from ...errors import InvalidRequest
from .description import Device, Hardware, Link

GIB = 1 << 30
T, G = 1e12, 1e9

_SHARE = 0.8
_LATENCY = 12e-6
_NETWORK_LATENCY = 30e-6
"""An exchange of nothing between hosts: that of one host, and a few microseconds each through card, switch and card."""
_TAKEN = 1.2e9
"""Bytes of a card that the driver, CUDA's context and NCCL take, as ``lab room`` counts them."""

_DENSE: Mapping[str, float] = {
    "H100": 989.4 * T, "H800": 989.4 * T, "H20": 148 * T, "L20": 119.5 * T, "L40": 181 * T, "GB200": 2500 * T,
    "RTX 3060": 25.6 * T, "RTX 3090": 71 * T, "RTX 4080": 97.5 * T, "RTX 4090": 165.2 * T, "RTX 4090 D": 147.2 * T,
    "RTX PRO 5000": 268 * T,
}  # fmt: skip
_REACHED: Mapping[str, float] = {"H100": 794.5 * T, "H800": 794.5 * T, "GB200": 1822 * T}
_MEMORY: Mapping[str, tuple[int, float, int]] = {
    "H100": (80, 3350 * G, 132), "H800": (80, 3350 * G, 132), "H20": (96, 4000 * G, 78), "L20": (48, 864 * G, 92),
    "L40": (48, 864 * G, 142), "GB200": (186, 8000 * G, 148), "RTX 3060": (12, 360 * G, 28),
    "RTX 3090": (24, 936 * G, 82), "RTX 4080": (16, 717 * G, 76), "RTX 4090": (24, 1008 * G, 128),
    "RTX 4090 D": (24, 1008 * G, 114), "RTX PRO 5000": (72, 1344 * G, 110),
}  # fmt: skip
"""GiB, bytes a second, and streaming multiprocessors."""

_FLASH2, _FLASH2_HOPPER, _FLASH3, _FLASH4 = 0.73, 0.35, 0.75, 0.71
_HOPPER = ("H100", "H800")
KERNELS = ("flash2", "flash3", "flash4")
"""Attention kernels that a description may assume."""


def card(name: str, kernel: str = "", *, matrix: float = 1.0) -> Device:
    """Return a card.

    Args:
        name: of a kind that is listed.
        kernel: one of ``KERNELS``; the best that the card has by default.
        matrix: how many products of 8-bit numbers it computes in the time of one of 16-bit numbers, if those are meant.
    """
    memory, bandwidth, units = _MEMORY[name]
    best = "flash3" if name in _HOPPER else "flash4" if name == "GB200" else "flash2"
    shares = {"flash2": _FLASH2_HOPPER if name in _HOPPER else _FLASH2, "flash3": _FLASH3, "flash4": _FLASH4}
    return Device(
        name=name, matrix=matrix * _REACHED.get(name, _SHARE * _DENSE[name]),
        attention=shares[kernel or best] * _DENSE[name], memory=memory * GIB - _TAKEN, bandwidth=bandwidth, units=units,
    )  # fmt: skip


def nvlink(count: int, name: str, one_way: float, kernel: str = "") -> Hardware:
    """Return cards of one host that NVLink joins; each sends ``one_way`` bytes a second by the datasheet."""
    links = (_of_all(count, _SHARE * one_way),) if count > 1 else ()
    return Hardware(name=f"{count}x{name} NVLink", devices=(card(name, kernel),) * count, links=links, files=3e9)


def pcie(
    count: int, name: str, bandwidth: float, kernel: str = "", *, socket: int = 0, matrix: float = 1.0
) -> Hardware:
    """Return cards of one host that only PCIe joins.

    Args:
        bandwidth: bytes a second that one card sends.
        socket: cards of one socket; 0 if all are of the same.
    """
    links = [_of_all(count, bandwidth)] if count > 1 else []
    if 0 < socket < count:
        groups = [tuple(range(start, min(start + socket, count))) for start in range(0, count, socket)]
        inside = [Link(devices=group, bandwidth=bandwidth, latency=_LATENCY) for group in groups if len(group) > 1]
        links = [_of_all(count, bandwidth, total=2 * _SOCKETS), *inside]
    devices = (card(name, kernel, matrix=matrix),) * count
    return Hardware(name=f"{count}x{name} PCIe", devices=devices, links=tuple(links), streaming=bandwidth)


_PCIE4, _PCIE5, _PCIE4_X8, _SOCKETS = 24 * G, 48 * G, 12 * G, 10 * G


def _of_all(count: int, bandwidth: float, *, total: float = 0.0, latency: float = _LATENCY) -> Link:
    return Link(devices=tuple(range(count)), bandwidth=bandwidth, latency=latency, total=total)


def _two_hosts() -> Hardware:
    """Two hosts of eight H100, each with one card of 100 Gbit/s, which all of a host's devices share."""
    card_of_host = _SHARE * 12.5 * G
    links = [_of_all(16, card_of_host, total=2 * card_of_host, latency=_NETWORK_LATENCY)]
    for start in (0, 8):
        devices = tuple(range(start, start + 8))
        links.append(Link(devices=devices, bandwidth=_SHARE * 450 * G, latency=_LATENCY))
    return Hardware(
        name="2x8xH100, 100 Gbit/s", devices=(card("H100"),) * 16, links=tuple(links), hosts=(8, 8), files=3e9
    )


def _unequal() -> Hardware:
    names = ("RTX 4090", "RTX 4080", "RTX 3090", "RTX 3060")
    return Hardware(
        name="RTX 4090, RTX 4080, RTX 3090 and RTX 3060", devices=tuple(map(card, names)),
        links=(_of_all(4, _PCIE4_X8),), streaming=_PCIE4_X8,
    )  # fmt: skip


MACHINES: Mapping[str, Callable[[], Hardware]] = {
    "8xH100": lambda: nvlink(8, "H100", 450 * G),
    "8xH800": lambda: nvlink(8, "H800", 200 * G),
    "8xH20": lambda: nvlink(8, "H20", 450 * G),
    "72xGB200": lambda: nvlink(72, "GB200", 900 * G),
    "8xL40": lambda: pcie(8, "L40", _PCIE4, socket=4),
    "4xL20": lambda: pcie(4, "L20", _PCIE4),
    "2x3090": lambda: pcie(2, "RTX 3090", _PCIE4_X8),
    "4x4090": lambda: pcie(4, "RTX 4090", _PCIE4),
    "8x4090D": lambda: pcie(8, "RTX 4090 D", _PCIE4, socket=4),
    "2xRTX-PRO-5000-fp8": lambda: pcie(2, "RTX PRO 5000", _PCIE5, matrix=2.0),
    "2x8xH100-100Gbit": _two_hosts,
    "unequal": _unequal,
}
"""By the name on the command line."""


def machine(name: str) -> Hardware:
    """Return a machine by its name.

    Raises:
        InvalidRequest: there is none. The message lists them.
    """
    if name not in MACHINES:
        raise InvalidRequest(
            f"{name} is neither a file nor a machine that is described; described: {', '.join(MACHINES)}"
        )
    return MACHINES[name]()
