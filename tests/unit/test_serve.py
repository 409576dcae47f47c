"""``serve --detach`` beside a backend that already runs: what it does otherwise is named."""

import argparse
from dataclasses import replace
from pathlib import Path

import pytest

from parallel_backend import serve
from parallel_backend.errors import InvalidRequest
from parallel_backend.machines.gateway.process import Listening
from parallel_backend.machines.links.address import Address
from parallel_backend.machines.settings import Settings
from parallel_backend.protocol.endpoint import Endpoint
from parallel_backend.protocol.hosts import HostStatus
from parallel_backend.protocol.status import Status


def test_models_are_not_sent_between_hosts() -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    with pytest.raises(InvalidRequest, match=r"copy the models to each host with rsync, .*NFS, .*hf download"):
        serve.parse(parser.parse_args(["--share-models"]))


HOSTS = (HostStatus(node=0, state="joined"), HostStatus(node=1, state="missing"))
RUNS = Status(
    pid=1, protocol=1, generation=0, state="idle", running=None, queued=(), layout=None, idle_timeout=600.0, memory=1,
    ranks=(), interface="eth0", listens="10.0.0.1:7400", hosts=HOSTS,
)  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "status", "difference"),
    [
        ("", RUNS, ""),
        ("", replace(RUNS, listens=""), "does not listen for other machines"),
        ("", replace(RUNS, hosts=HOSTS[:1]), "was started with --nnodes 1"),
        ("--idle-timeout 0", RUNS, "ends after 600 s without work"),
        ("--idle-timeout 600", RUNS, ""),
        ("--spares 2", RUNS, "keeps as many spare ranks as fit"),
        ("--spares 2", replace(RUNS, most_spares=2), ""),
        ("--spares 0", replace(RUNS, most_spares=2), "keeps 2 spare ranks"),
        ("--spares 0", RUNS, "keeps as many spare ranks as fit"),
        ("--spares 0", replace(RUNS, most_spares=0), ""),
        ("--idle-timeout 5", replace(RUNS, idle_timeout=0.0), "never ends by itself"),
        ("", replace(RUNS, interface="eth1"), "was started with --interface eth1"),
        ("--listen 10.0.0.1:7400", RUNS, ""),
        ("--listen 10.0.0.1:7400", replace(RUNS, listens="10.0.0.1:7400, whose gateway is starting again"), ""),
        ("--listen 10.0.0.1:7400", replace(RUNS, listens="10.0.0.1:7401"), "listens at 10.0.0.1:7401"),
        ("", replace(RUNS, listens="10.0.0.1:7401"), ""),
    ],
)
def test_what_a_running_backend_does_otherwise_is_named(arguments: str, status: Status, difference: str) -> None:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    options = parser.parse_args(["--nnodes", "2", "--interface", "eth0", *arguments.split()])
    listening = Listening(address=Address.parse("10.0.0.1:7400", what="--listen"), certificates=Path("certificates"))
    machines = Settings(listening=listening, nodes=2, interface="eth0")
    endpoint = Endpoint(folder=Path("/none"))
    serving = serve.Serving(endpoint=endpoint, idle_timeout=lambda: 0.0, spares=None, machines=machines)
    assert serve._difference(status, serving, options) == difference
