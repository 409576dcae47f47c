"""Requests go on without hosts that are not there, and use them again when they are."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from parallel_backend.client import lost_devices
from parallel_backend.client.exchange import Timeouts
from parallel_backend.client.lost_devices import LostDevices
from parallel_backend.client.retry import Recovery, RetriedRequest
from parallel_backend.errors import RankFailed
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.endpoint import Endpoint
from parallel_backend.protocol.hosts import HostStatus
from parallel_backend.protocol.messages import RankRequest, Trial
from parallel_backend.protocol.model_spec import Devices, ModelSpec

DEVICES = Devices(kind="cpu", indices=(0, 1, 0, 1, 0), hosts=("", "", "b", "b", "c"))
SPEC = ModelSpec(path="/model", devices=DEVICES)


class Backend:
    """A client of a backend whose hosts come and go, and whose ranks start on those that are there.

    Attributes:
        joined: the hosts that are there.
        asked: the devices of each request.
        broken: a rank of host b that does not start although its host is there; None for none.
    """

    endpoint, timeouts = Endpoint(folder=Path("/nowhere")), Timeouts()

    def __init__(self, *joined: str) -> None:
        self.joined, self.asked = set(joined), list[Devices]()
        self.broken: int | None = None
        self.questions = 0

    def hosts(self) -> tuple[HostStatus, ...]:
        """The hosts."""
        self.questions += 1
        first = HostStatus(node=0, state="joined", name="b")  # the first host may be called like another one
        others = [HostStatus(node=node, state="joined", name=name) for node, name in enumerate(sorted(self.joined), 1)]
        return first, *others

    def attempt(self, message: RankRequest, tensors: Mapping[str, Tensor], **options: Any) -> dict[str, Tensor]:
        """Run a request, or say which ranks do not start: only those of one missing host."""
        devices = message.model.devices
        self.asked.append(devices)
        missing = sorted(set(devices.hosts) - self.joined - {""})
        gone = [rank for rank, host in enumerate(devices.hosts) if missing and host == missing[0]]
        if self.broken is not None and ("b", self.broken) in zip(devices.hosts, devices.indices, strict=True):
            gone = [list(zip(devices.hosts, devices.indices, strict=True)).index(("b", self.broken))]
        if gone:
            error = RankFailed("they do not start")
            error.not_started = tuple(gone)
            raise error
        return {}


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lost_devices, "AGAIN", 0.0)


def ask(backend: Backend, lost: LostDevices, spec: ModelSpec = SPEC) -> list[str]:
    """Run a request, and return what it says."""
    said: list[str] = []
    RetriedRequest(backend, Trial(name="echo", model=spec), {}, recovery=Recovery(notify=said.append, lost=lost)).run()
    return said


def hosts_of(devices: Devices) -> list[str]:
    return [devices.host_of(rank) for rank in range(len(devices.indices))]


def test_all_missing_hosts_are_done_without_at_once_and_used_again_when_they_are_there() -> None:
    backend, lost = Backend(), LostDevices()
    said = ask(backend, lost)
    assert hosts_of(backend.asked[-1]) == ["", ""]
    assert "on 2 CPU ranks" in said[-1]
    backend.joined = {"b"}
    assert ask(backend, lost) == []
    assert hosts_of(backend.asked[-1]) == ["", "", "b", "b"]
    backend.joined = {"b", "c"}
    assert ask(backend, lost) == []
    assert backend.asked[-1] == DEVICES
    backend.joined = {"c"}
    ask(backend, lost)
    assert hosts_of(backend.asked[-1]) == ["", "", "c"]


def test_a_host_that_is_back_before_anybody_looks_is_asked_again() -> None:
    class Back(Backend):
        def attempt(self, message: RankRequest, tensors: Mapping[str, Tensor], **options: Any) -> dict[str, Tensor]:
            try:
                return super().attempt(message, tensors, **options)
            finally:
                self.joined = {"b", "c"}

    backend = Back("c")
    assert len(ask(backend, LostDevices())) == 1
    assert [len(devices.indices) for devices in backend.asked] == [5, 5]


def test_a_device_of_a_host_that_is_there_is_done_without_alone() -> None:
    backend, lost = Backend("b", "c"), LostDevices()
    backend.broken = 1
    ask(backend, lost)
    assert backend.asked[-1] == DEVICES.of_ranks([0, 1, 2, 4])
    before = backend.questions
    ask(backend, lost)
    assert backend.asked[-1] == DEVICES.of_ranks([0, 1, 2, 4])
    assert backend.questions == before, "no host is missing, so nobody asks for one"
    lost.forget()
    backend.broken = None
    ask(backend, lost)
    assert backend.asked[-1] == DEVICES


def test_the_layout_is_the_nearest_that_fits_on_what_is_left() -> None:
    backend, lost = Backend("c"), LostDevices()
    ask(backend, lost, replace(SPEC, layout=ParallelLayout.parse("ring=5")))
    assert lost.without(replace(SPEC, layout=ParallelLayout.parse("ring=5"))).layout == ParallelLayout.parse("ring=3")


def test_a_first_host_whose_ranks_do_not_start_is_an_error() -> None:
    class Broken(Backend):
        def attempt(self, message: RankRequest, tensors: Mapping[str, Tensor], **options: Any) -> dict[str, Tensor]:
            error = RankFailed("none of them starts")
            error.not_started = tuple(range(len(message.model.devices.indices)))
            raise error

    with pytest.raises(RankFailed, match="none of them starts"):
        ask(Broken("b", "c"), LostDevices())
