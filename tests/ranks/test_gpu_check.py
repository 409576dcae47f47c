"""What ``lab/gpu_check`` measures between GPUs, on CPU ranks: right exchanges pass, wrong ones are found."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from lab.gpu_check.several import exchange_kinds
from lab.gpu_check.several.exchange_kinds import KINDS
from lab.gpu_check.several.exchanges_rank import axes, check
from lab.gpu_check.several.overlap_work import ON_CPU, WORKS
from parallel_backend.distributed import collectives, stop_flags
from parallel_backend.distributed.sent_bytes import SentBytes
from tests.ranks import driver

CPU = torch.device("cpu")
REAL = {name: getattr(collectives, name) for name in ("_exchange", "agree", "gather_texts")}
REAL_DIST = {
    name: getattr(dist, name) for name in ("all_reduce", "all_gather_into_tensor", "all_to_all_single", "broadcast")
}
COMPUTES = ("matmul", "_scaled_dot_product_flash_attention_for_cpu")


def exchanged(rank, layout):
    """Check every exchange of a layout; return the names of its axes."""
    devices = driver.mesh(rank, layout)
    names = [axis.name for axis in axes(devices)]
    for axis in axes(devices):
        check(axis, CPU)
    return names


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        ("ring=2 ulysses=2 shard_weights", ["ring", "ulysses", "sequence", "weights", "whole"]),
        ("ring=4 stale=previous", ["ring", "ring", "behind", "whole"]),
        ("pipe=4", ["pipe", "even boundaries", "odd boundaries", "return", "whole"]),
    ],
)
def test_right_exchanges_pass_on_every_axis(pools, layout, names):
    assert pools(4).run(exchanged, layout) == [names] * 4


def _exchanged_wrongly(sends, receives, axis):
    for work in REAL["_exchange"](sends, receives, axis):
        work.wait()
    for _, tensor in receives[:1]:
        tensor.add_(1)
    return []


def _reduced_locally(tensor, *args, **kwargs):
    """Leave the ranks' own values."""


def _gathered_wrongly(out, local, **kwargs):
    REAL_DIST["all_gather_into_tensor"](out, local, **kwargs)
    out.add_(1)


def _exchanged_at_once_wrongly(out, *args, **kwargs):
    work = REAL_DIST["all_to_all_single"](out, *args, **kwargs)
    work.wait()
    out.add_(1)
    return work


def _broadcast_wrongly(tensor, *args, **kwargs):
    REAL_DIST["broadcast"](tensor, *args, **kwargs)
    if tensor.dtype == torch.uint8:
        tensor.add_(1)


def _text_of_nobody(text, axis):
    REAL["gather_texts"](text, axis)
    return [""] * axis.size


class _StopsTooEarly(stop_flags.StopFlags):
    """All ranks but the first stop before the first part; they still receive all flags."""

    def should_continue(self):
        return super().should_continue() and not self.whole.index

    def finish(self):
        while not self.stopped:
            self._flags_ahead += 1
            super().should_continue()
        super().finish()


FAULTS = {
    "exchange": (collectives, "_exchange", _exchanged_wrongly),
    "all_to_all": (dist, "all_to_all_single", _exchanged_at_once_wrongly),
    "ring": (collectives, "_exchange", _exchanged_wrongly),
    "pipeline": (collectives, "_exchange", _exchanged_wrongly),
    "all_gather": (collectives, "_exchange", _exchanged_wrongly),
    "scatter_and_gather": (collectives, "_exchange", _exchanged_wrongly),
    "broadcast": (dist, "broadcast", _broadcast_wrongly),
    "all_reduce": (dist, "all_reduce", _reduced_locally),
    "gather_weights": (dist, "all_gather_into_tensor", _gathered_wrongly),
    "agree": (collectives, "gather_texts", _text_of_nobody),
    "stop": (exchange_kinds, "StopFlags", _StopsTooEarly),
}
"""By kind of exchange, what is replaced by something wrong."""


def with_a_fault(rank, name):
    """Run a kind of exchange with a fault; return what is wrong."""
    devices, wrong = driver.mesh(rank, "ulysses=3"), list[str]()
    target, attribute, replacement = FAULTS[name]
    kind = next(kind for kind in KINDS if kind.__name__ == name)
    with mock.patch.object(target, attribute, replacement):
        kind(devices.all_ranks, CPU, wrong)
    return wrong


def test_every_kind_of_exchange_has_a_fault():
    assert list(FAULTS) == [kind.__name__ for kind in exchange_kinds.KINDS]


@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_value_is_found(pools, name):
    assert any(pools(3).run(with_a_fault, name))


class _Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.computed = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.computed += func._schema.name.partition("::")[2] in COMPUTES
        return func(*args, **(kwargs or {}))


def worked(rank, name):
    """Return the computations and bytes sent of each kind of work."""
    layout, make = WORKS[name]
    devices, found = driver.mesh(rank, layout.format(ranks=2)), {}
    work = make(devices, CPU, ON_CPU)
    with torch.inference_mode():
        for kind in (work.both, work.compute, work.exchange):
            with SentBytes() as sent, _Counted() as counted:
                kind()
            found[kind.__name__] = (counted.computed, sent.total)
    return found


@pytest.mark.parametrize("name", WORKS)
def test_work_is_exchange_and_computation_and_each_alone(pools, name):
    for rank, found in enumerate(pools(2).run(worked, name)):
        (both, sent), (computed, nothing), (none, sent_alone) = found["both"], found["compute"], found["exchange"]
        waits = {"pipe": 3}.get(name, 0)  # products of one block, for which the last stage waits
        assert (none, nothing) == (0, 0)
        assert computed == both + waits > 0
        assert sent == sent_alone
        assert sent > 0 or (name, rank) == ("pipe", 1)
