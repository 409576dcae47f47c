"""Ranks on two and three hosts give what one rank gives, and hosts that are lost and come back do no harm."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.processes import wait_until

from .backend import Backend
from .conftest import NewNetwork
from .hosts import Host, kill_all, link_down, link_up, listeners
from .run import SECONDS, Run, close

NOTICED = 20.0
"""Seconds within which a lost host has to be named."""


@pytest.fixture
def new_backend(new_network: NewNetwork, tmp_path: Path) -> Callable[..., Backend]:
    def start(*names: str, **options: Any) -> Backend:
        backend = Backend(hosts=new_network(*names, **options), certificates=tmp_path / "certificates")
        backend.start()
        return backend

    return start


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param((("0,0@beta,1@beta", ""),), marks=pytest.mark.everyday),
        (("all", ""), ("0,0@beta", "ring=2"), ("0,1,0@beta", "ulysses=3"), ("0,0@beta,1@beta", "pipe=3 patches=1")),
    ],
    ids=["three ranks", "layouts"],
)
def test_two_hosts_equal_one(
    new_backend: Callable[..., Backend], model: Path, tmp_path: Path, layouts: tuple[tuple[str, str], ...]
) -> None:
    backend = new_backend("alpha", "beta")
    alpha, beta = backend.hosts
    one = Run(backend, alpha, model, tmp_path / "one.safetensors", "0", "", "4").samples()
    for number, (devices, layout) in enumerate(layouts):
        run = Run(backend, alpha, model, tmp_path / f"{number}.safetensors", devices, layout, "4")
        assert close(run.samples(), one), (devices, layout)
    ranks = backend.status()["ranks"]
    assert [rank["host"] for rank in ranks] == ["", "beta", "beta"]
    # Nothing listens for others but the gateway and, on the interface that was named, gloo.
    for host in (alpha, beta):
        addresses = {listener.address for listener in listeners(host)}
        assert addresses <= {"127.0.0.1", host.address}, addresses
    backend.stop()
    wait_until(lambda: not listeners(beta), SECONDS, "nothing listens on the other host")


def test_a_third_host_asks(new_backend: Callable[..., Backend], model: Path, tmp_path: Path) -> None:
    backend = new_backend("alpha", "beta", "gamma")
    gamma = backend.hosts[2]
    remote = {"PARALLEL_DIT_BACKEND": backend.address}
    one = Run(backend, gamma, model, tmp_path / "one.safetensors", "0", "", "3", **remote).samples()
    three = Run(backend, gamma, model, tmp_path / "3.safetensors", "0,0@beta,0@gamma", "", "3", **remote)
    assert close(three.samples(), one)
    assert three.said()[-1]["layout"] == "ring=3"


@pytest.mark.parametrize(
    "cut", [pytest.param(link_down, marks=pytest.mark.everyday), kill_all], ids=["link down", "power cut"]
)
def test_a_host_that_is_cut_off_is_named_and_the_run_goes_on_without_it(
    new_backend: Callable[..., Backend], model: Path, tmp_path: Path, cut: Callable[[Host], None]
) -> None:
    backend = new_backend("alpha", "beta")
    alpha, beta = backend.hosts
    steps = "300"
    whole = Run(backend, alpha, model, tmp_path / "whole.safetensors", "0,0@beta", "", steps).samples()
    go = tmp_path / "go"
    run = Run(backend, alpha, model, tmp_path / "cut.safetensors", "0,0@beta", "", steps, again=str(go))
    run.reaches(20)
    cut(beta)
    cut_at = time.monotonic()
    run.ends()
    notices = [line for line in run.said() if "notice" in line]
    assert "is lost with its host beta" in notices[0]["notice"]
    assert notices[0]["at"] - cut_at < NOTICED
    assert "host beta" in notices[1]["notice"]
    assert "on 1 CPU rank" in notices[1]["notice"]
    if cut is link_down:
        link_up(beta)
    else:
        backend.join(beta, 1)
    backend.wait_for(["joined", "joined"])
    go.touch()
    assert close(run.samples(), whole)
    assert [[host for host, _ in end["ranks"]] for end in run.ends(2)] == [[""], ["", "beta"]]
