"""Spare ranks on every host take the places of ranks that die, so that a run goes on without another import."""

import os
import signal
import time
from pathlib import Path

from scripts.processes import wait_until

from .backend import Backend
from .hosts import Host
from .run import SECONDS, Run, close

STEPS = "300"


def test_a_run_goes_on_with_the_spare_ranks_of_both_hosts(
    two_hosts: tuple[Host, ...], model: Path, tmp_path: Path
) -> None:
    backend = Backend(hosts=two_hosts, certificates=tmp_path / "certificates", env={"PARALLEL_DIT_SPARES": "1"})
    backend.start()

    def ready() -> dict[str, int]:
        return {spare["host"]: spare["pid"] for spare in backend.status()["spares"] if spare["ready"]}

    def waiting() -> dict[str, int]:
        wait_until(lambda: ready().keys() == {"", "beta"}, SECONDS, "both hosts have a spare rank")
        return ready()

    def ranks() -> dict[str, int]:
        return {rank["host"]: rank["pid"] for rank in backend.status()["ranks"]}

    spares = waiting()
    whole = Run(backend, two_hosts[0], model, tmp_path / "whole.safetensors", "0,0@beta", "", STEPS).samples()
    assert ranks() == spares
    victim, spares = ranks()["beta"], waiting()
    run = Run(backend, two_hosts[0], model, tmp_path / "run.safetensors", "0,0@beta", "", STEPS)
    run.reaches(20)
    os.kill(victim, signal.SIGKILL)
    killed_at = time.monotonic()
    assert close(run.samples(), whole)
    assert ranks() == spares
    (notice,) = (line for line in run.said() if "notice" in line)
    step = next(line for line in run.said() if line.get("step") and line["at"] > notice["at"])
    print(f"{step['at'] - killed_at:.2f} s from the death of the rank until the next step")
