"""A host that lacks a model gets it from the first host, and goes on where an earlier request was broken off."""

from pathlib import Path

from scripts.processes import wait_until
from tests.support import tiny

from .backend import Backend
from .conftest import NewNetwork
from .hosts import sent_bytes
from .run import SECONDS, Run, close


def test_a_model_goes_to_a_host_that_lacks_it_once(new_network: NewNetwork, tmp_path: Path) -> None:
    hosts = new_network("alpha", "beta", rate="100mbit")
    alpha, beta = hosts
    folder = alpha.here / "models"
    backend = Backend(
        hosts=hosts,
        certificates=tmp_path / "certificates",
        env={"PARALLEL_DIT_SHARE_MODELS": "1", "PARALLEL_DIT_MODELS": str(folder)},
    )
    for host in hosts:
        (host.folder / "models").mkdir()
    tiny.write(alpha.folder / "models" / "model", tiny.Tiny(heads=8, head_dim=64, layers=12))
    weights = sum(file.stat().st_size for file in (alpha.folder / "models").rglob("*.safetensors"))
    backend.start()
    one = Run(backend, alpha, folder / "model", tmp_path / "one.safetensors", "0", "", "3").samples()

    before = sent_bytes(alpha)
    broken_off = Run(backend, alpha, folder / "model", tmp_path / "cut.safetensors", "0,0@beta", "", "3")
    unfinished = beta.folder / "models" / "shared"
    wait_until(
        lambda: sum(file.stat().st_size for file in unfinished.rglob("*.safetensors")) >= weights * 2 // 3,
        SECONDS,
        "two thirds of the model have arrived",
    )
    broken_off.kill()
    wait_until(lambda: backend.status()["state"] == "idle", SECONDS, "the request has ended")
    run = Run(backend, alpha, folder / "model", tmp_path / "all.safetensors", "0,0@beta", "", "3")
    assert close(run.samples(), one)
    assert sent_bytes(alpha) - before < 1.3 * weights, "what had arrived is not sent again"
    [arrived] = unfinished.glob("*/model")
    assert not list(unfinished.glob("*.part"))

    backend.stop()  # another backend finds it there
    backend.start()
    before = sent_bytes(alpha)
    again = Run(backend, alpha, folder / "model", tmp_path / "again.safetensors", "0,0@beta", "", "3")
    assert close(again.samples(), one)
    assert sent_bytes(alpha) - before < weights // 4
    assert arrived.is_dir()
