"""Spare ranks on every host take the places of ranks that die, so that a run goes on without another import."""

import os
import signal
import time
from pathlib import Path

from scripts.processes import wait_until

from .backend import Backend
from .hosts import Host
from .run import SECONDS, Run, close


def test_a_run_goes_on_with_the_spare_ranks_of_both_hosts(
    two_hosts: tuple[Host, ...], model: Path, tmp_path: Path
) -> None:
    backend = Backend(hosts=two_hosts, certificates=tmp_path / "certificates", env={"PARALLEL_DIT_SPARES": "1"})
    backend.start()

    def ready() -> dict[str, int]:
        return {spare["host"]: spare["pid"] for spare in backend.status()["spares"] if spare["ready"]}

    first = Run(backend, two_hosts[0], model, tmp_path / "first.safetensors", "0,0@beta", "", "300")
    whole = first.samples()
    wait_until(lambda: ready().keys() == {"", "beta"}, SECONDS, "both hosts have a spare rank")
    waiting = ready()
    run = Run(backend, two_hosts[0], model, tmp_path / "run.safetensors", "0,0@beta", "", "300")
    run.reaches(20)
    (victim,) = (rank["pid"] for rank in backend.status()["ranks"] if rank["host"] == "beta")
    os.kill(victim, signal.SIGKILL)
    killed_at = time.monotonic()
    assert close(run.samples(), whole)
    assert {rank["host"]: rank["pid"] for rank in backend.status()["ranks"]} == waiting
    after = [line["at"] - killed_at for line in run.said() if line.get("step") and line["at"] > killed_at + 0.05]
    print(f"{min(after):.2f} s from the death of the rank until the next step")
