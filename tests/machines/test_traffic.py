"""Over a slow link, the layout that is chosen sends much less than plain Ulysses, and steps take less time."""

from pathlib import Path

import pytest

from tests.support import tiny

from . import network
from .backend import Backend
from .conftest import NewNetwork
from .hosts import sent_bytes
from .run import Run

RATE = "200mbit"
SIZE = "1x48x48"
STEPS = 6
DEVICES = "0,1,0@beta,1@beta"


def seconds_and_bytes(backend: Backend, model: Path, results: Path, layout: str) -> tuple[float, float]:
    """Return seconds a step, and bytes that both hosts send meanwhile, of which the first step loads the weights."""
    alpha, beta = backend.hosts
    warm = Run(backend, alpha, model, results.with_suffix(".warm"), DEVICES, layout, "2", size=SIZE)
    warm.samples()
    before = sent_bytes(alpha) + sent_bytes(beta)
    run = Run(backend, alpha, model, results, DEVICES, layout, str(STEPS), size=SIZE)
    run.samples()
    sent = sent_bytes(alpha) + sent_bytes(beta) - before
    ends = [line["at"] for line in run.said() if "step" in line]
    print(
        layout or "auto",
        run.said()[-1]["layout"],
        f"{(ends[-1] - ends[0]) / (len(ends) - 1):.3f} s a step, {sent} bytes",
    )
    return (ends[-1] - ends[0]) / (len(ends) - 1), float(sent)


def test_auto_sends_less_and_is_faster_than_ulysses(new_network: NewNetwork, tmp_path: Path) -> None:
    if reason := network.can_shape():
        pytest.skip(f"this machine cannot shape a link: {reason}")
    model = tiny.write(tmp_path / "model", tiny.Tiny(heads=4, head_dim=32, layers=4))
    backend = Backend(hosts=new_network("alpha", "beta", rate=RATE), certificates=tmp_path / "certificates")
    backend.start()
    auto_seconds, auto_bytes = seconds_and_bytes(backend, model, tmp_path / "auto.safetensors", "")
    seconds, sent = seconds_and_bytes(backend, model, tmp_path / "ulysses.safetensors", "ulysses=4")
    assert sent >= 4 * auto_bytes, (sent, auto_bytes)
    assert seconds >= 2 * auto_seconds, (seconds, auto_seconds)
