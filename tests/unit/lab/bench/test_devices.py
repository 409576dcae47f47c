"""Which device each part of a measurement runs on. The meta device stands for a GPU where tensors are moved."""

import argparse
import contextlib
import subprocess
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from lab.__main__ import main
from lab.bench import lora, wire
from lab.bench.loop import run as loop_run
from lab.bench.ranks import rank as bench_rank
from lab.bench.ranks.cases import Case
from lab.bench.ranks.peers import BY_NAME, ONE_PROCESS
from lab.bench.ranks.rank import Runner, StepRequest
from lab.bench.ranks.team import Team
from lab.bench.step import run as step_run
from lab.bench.step.contestants import LayoutContestant, PeerContestant
from lab.verify import command
from lab.verify.forward.cells import SmallModels
from lab.verify.forward.matrix import Cell
from lab.verify.loops import run as loops
from lab.verify.vae import run as vae
from parallel_backend.distributed import peer_access, process_group, rank_speeds
from parallel_backend.families import registry as families
from parallel_backend.families.registry import family_of
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.model_spec import Devices

DIT = "DiTTransformer2DModel"
META = torch.device("meta")
REVERSED = Devices(kind="cuda", indices=(1, 0))


class Stopped(Exception):
    """Ends a command where its devices are known."""


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("PARALLEL_DIT_COLLECTIVES", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stops each command where its ranks would start, and lists what devices it has then."""
    found: list[Any] = []

    def stop(devices: Any) -> Any:
        found.append(devices)
        raise Stopped

    monkeypatch.setattr(step_run, "write_model", lambda *_: Path())
    monkeypatch.setattr(step_run, "contestants", lambda layouts, peers, devices, *_: stop(devices))
    monkeypatch.setattr(loop_run, "write_model", lambda *_: Path())
    monkeypatch.setattr(loop_run, "_at", lambda rate, team, *_: stop(team.devices))
    monkeypatch.setattr(wire, "temporary_backend", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(wire, "measure", lambda client, devices, **_: stop(devices))
    monkeypatch.setattr(lora, "write_wan", lambda path, **_: save_file({"blocks.w": torch.zeros(1)}, path))
    monkeypatch.setattr(lora, "temporary_backend", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(lora, "_measure", lambda client, spec, *_: stop(spec.devices))
    monkeypatch.setattr(command, "verifier", stop)
    monkeypatch.setattr(vae, "_folder", lambda *_: Path(__file__).parents[4] / "checkpoints" / "shapes")
    monkeypatch.setattr(vae.VaeComparison, "wanted", lambda self: stop((self.devices, self.device)))
    return found


COMMANDS = [
    ("bench", "--layout", "ulysses=2", "--tokens", "64"),
    ("bench", "--steps", "2", "--layout", "ring=2", "--tokens", "64"),
    (
        "bench",
        "wire",
    ),
    ("verify", "--family", "dit", "--layout", "ulysses=2"),
    ("verify", "--warmup", "1", "--family", "dit", "--layout", "pipe=2"),
    ("verify", "--quality", "--layout", "pipe=2"),
]


@pytest.mark.parametrize("arguments", COMMANDS)
@pytest.mark.parametrize(("option", "expected"), [(["--devices", "cuda:1,cuda:0"], (1, 0)), ([], (0, 1))])
def test_ranks_run_on_the_gpus_that_are_named_or_on_all(two_gpus, received, arguments, option, expected):
    with pytest.raises(Stopped):
        main([*arguments, *option])
    assert received == [Devices(kind="cuda", indices=expected)]


def test_all_contestants_compute_in_the_dtype_that_is_asked_for(two_gpus, received, monkeypatch, tmp_path):
    def contestants(layouts: Any, peers: Any, devices: Devices, *more: Any) -> Any:
        received.append(more[-1])
        raise Stopped

    monkeypatch.setattr(step_run, "contestants", contestants)
    for option in ([], ["--dtype", "bfloat16"]):
        with pytest.raises(Stopped):
            main(["bench", "--layout", "ulysses=2", "--tokens", "64", *option])
    assert received == ["float32", "bfloat16"]
    ours = LayoutContestant(ParallelLayout(), cast(Any, None), tmp_path, REVERSED, "bfloat16")
    theirs = PeerContestant(ONE_PROCESS, REVERSED, tmp_path, tmp_path, "bfloat16")
    assert ours._spec.dtype == theirs.team.dtype == "bfloat16"


def test_a_layout_of_one_rank_has_one_device(two_gpus, received):
    with pytest.raises(Stopped):
        main(["bench", "lora", "--devices", "1,0"])
    assert received == [Devices(kind="cuda", indices=(1,))]  # of the first layout


def test_the_reference_of_a_vae_runs_on_the_first_device(two_gpus, received):
    with pytest.raises(Stopped):
        main(["verify", "--vae", "shapes", "--devices", "1,0"])
    assert received == [(REVERSED, torch.device("cuda:1"))]


def test_the_reference_of_small_models_runs_on_the_first_device(two_gpus, received, monkeypatch):
    created: list[torch.device] = []

    def small_models(folder: Path, device: torch.device) -> Any:
        created.append(device)
        return SimpleNamespace(comparison=None)

    monkeypatch.setattr(command, "SmallModels", small_models)
    with pytest.raises(Stopped):
        main(["verify", "--family", "dit", "--layout", "ulysses=2", "--devices", "1,0"])
    assert created == [torch.device("cuda:1")]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("bench", "memory", "--devices", "1"), "needs 2 ranks and --devices '1' means 1 GPU"),
        (("verify", "--memory", "--devices", "1"), "needs 2 ranks and --devices '1' means 1 GPU"),
        (("bench", "--layout", "ring=3"), "layout \"ring=3\" needs 3 ranks and --devices 'all' means 2 GPUs"),
        (("verify", "--family", "dit", "--layout", "ring=3"), "CUDA_VISIBLE_DEVICES= for CPU ranks"),
        (("bench", "--steps", "2", "--layout", "ring=2", "--link", "100"), "--link limits a network"),
    ],
)
def test_what_gpus_cannot_do_is_refused_before_anything_starts(two_gpus, received, capsys, arguments, sentence):
    assert main(arguments) == 1
    assert sentence in capsys.readouterr().err
    assert not received


def test_links_of_gpus_that_use_gloo_are_limited(two_gpus, received, monkeypatch):
    monkeypatch.setenv("PARALLEL_DIT_COLLECTIVES", "gloo")
    monkeypatch.setattr(loop_run, "Links", contextlib.nullcontext)
    with pytest.raises(Stopped):
        main(["bench", "--steps", "2", "--layout", "ring=2", "--tokens", "64", "--link", "100", "--devices", "0,0"])
    assert received == [Devices(kind="cuda", indices=(0, 0), collectives="gloo")]


def test_threads_matter_on_a_cpu_alone():
    peer = BY_NAME["one process, two threads"]
    assert peer.obstacle(Devices(kind="cpu", indices=(0,))) is None
    assert peer.obstacle(REVERSED) == "threads of the CPU do not matter on a GPU"


@pytest.mark.parametrize("collectives", ["nccl", "gloo"])
def test_each_process_of_a_peer_is_given_its_gpu(monkeypatch, tmp_path, collectives):
    started: list[tuple[list[str], dict[str, str]]] = []

    def popen(arguments: list[str], *, env: dict[str, str], **_: Any) -> None:
        started.append((arguments, env))

    monkeypatch.setattr(subprocess, "Popen", popen)
    devices = Devices(kind="cuda", indices=(1, 0), collectives=collectives)
    team = Team(BY_NAME["diffusers ulysses=2"], devices, tmp_path, tmp_path, dtype="bfloat16")
    for rank in range(2):
        team._start_rank(rank)
        arguments, environment = started[rank]
        assert arguments[arguments.index("--device") + 1] == f"cuda:{1 - rank}"
        assert arguments[arguments.index("--collectives") + 1] == collectives
        assert arguments[arguments.index("--dtype") + 1] == "bfloat16"
        assert (environment["RANK"], environment["LOCAL_RANK"]) == (str(rank), str(1 - rank))
    for link in team._links:
        link.close()


@pytest.mark.parametrize(
    ("device", "collectives", "ranks", "eager", "backend", "connects"),
    [
        ("cuda:1", "nccl", 2, True, "cpu:gloo,cuda:nccl", True),
        ("cuda:1", "nccl", 2, False, "cpu:gloo,cuda:nccl", False),
        ("cuda:1", "nccl", 1, True, "cpu:gloo,cuda:nccl", False),
        ("cuda:1", "gloo", 2, True, "gloo", False),
        ("cpu", "nccl", 2, True, "gloo", False),
    ],
)
def test_a_rank_selects_its_gpu_and_connects_with_nccl(
    monkeypatch, device, collectives, ranks, eager, backend, connects
):
    """One rank alone needs no communicator, which would take memory."""
    steps: list[Any] = []
    where, store = torch.device(device), cast(Any, None)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: steps.append(("select", device)))
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda name, *, device_id, **_: steps.append((name, device_id))
    )
    monkeypatch.setattr(process_group, "connect", lambda group: steps.append(("connect", group)))
    monkeypatch.setattr(peer_access, "log_missing", lambda device: steps.append(("reach", device)))
    process_group.join(where, collectives, store, rank=0, world_size=ranks, timeout=timedelta(seconds=1), eager=eager)
    wanted: list[Any] = [("select", where)] if where.type == "cuda" else []
    wanted += [("reach", where)] if "nccl" in backend and ranks > 1 else []
    wanted += [(backend, where if connects else None), *([("connect", None)] if connects else [])]
    assert steps == wanted


def test_a_peer_computes_on_its_device_and_waits_for_it(monkeypatch, tmp_path):
    events: list[Any] = []

    class Stock(torch.nn.Linear):
        def stock(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            events.append((self.weight.device, inputs["x"].device))
            return inputs["x"]

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(bench_rank, "start", lambda options, threads: META)
    monkeypatch.setattr(
        bench_rank, "_module", lambda _, dtype, device: Stock(2, 2, device=device) if dtype == "float16" else None
    )
    monkeypatch.setattr(rank_speeds, "synchronize", events.append)
    monkeypatch.setattr(families, "family_of", lambda _: lambda module: module)
    save_file({"x": torch.zeros(2)}, tmp_path / "inputs")
    runner = Runner(argparse.Namespace(peer="one process", model=tmp_path, dtype="float16"))
    runner.run(StepRequest(inputs=str(tmp_path / "inputs")))
    assert events == [META, (META, META), META]


def test_hidden_attention_is_timed_on_the_device(monkeypatch):
    found: list[torch.device] = []
    monkeypatch.setattr(loop_run, "sdpa", lambda q, *_: found.append(q.device))
    case = Case(family="flux", tokens=64, text_tokens=8, branches=1)
    assert loop_run.hidden(case, ParallelLayout(ring=2), META) > 0
    assert set(found) == {META}


def test_the_forward_in_this_process_takes_and_returns_tensors_of_the_cpu():
    found: list[torch.device] = []

    def module(x: torch.Tensor, return_dict: bool) -> tuple[torch.Tensor]:
        found.append(x.device)
        return (torch.zeros(1),)

    assert wire._forward(module, {"x": torch.zeros(1)}, META).device.type == "cpu"
    assert found == [META]


def test_small_models_and_their_inputs_are_on_the_device(monkeypatch, tmp_path):
    found: list[torch.device] = []

    def stock(self: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        found.extend(tensor.device for tensor in (*inputs.values(), *self.module.parameters()))
        return torch.zeros(1)

    monkeypatch.setattr(family_of(DIT), "stock", stock)
    models = SmallModels(tmp_path, META)
    monkeypatch.setattr(models, "_path", lambda *_: tmp_path)
    comparison = models.comparison(Cell(class_name=DIT, variant="fixed variance", layout=ParallelLayout(ulysses=2)))
    comparison.stock(0)
    assert set(found) == {META}
    assert {tensor.device.type for tensor in comparison.inputs[0].values()} == {"cpu"}


def test_a_reference_loop_is_on_the_device_and_the_request_is_not(monkeypatch, tmp_path):
    found: list[torch.device] = []

    def reference(transformer: Any, message: Any, tensors: dict[str, torch.Tensor], plan: Any) -> torch.Tensor:
        parameters = transformer(0.0).module.parameters()
        found.extend(tensor.device for tensor in (*tensors.values(), *parameters, torch.arange(2)))
        return torch.zeros(1, device="cpu")

    def call(message: Any, tensors: dict[str, torch.Tensor]) -> None:
        assert {tensor.device.type for tensor in tensors.values()} == {"cpu"}
        raise Stopped

    monkeypatch.setattr(loops, "reference_samples", reference)
    client: Any = SimpleNamespace(call=call)
    verifier = loops.LoopVerifier(client, Devices(kind="cpu", indices=(0, 1)), tmp_path)
    verifier.device = META
    layout = ParallelLayout(pipe=2, patches=3)
    with pytest.raises(Stopped):
        verifier.compare(loops.Loop(class_name=DIT, variant="fixed variance", layout=layout))
    assert set(found) == {META}
    loops.module.cache_clear()  # its modules are on the meta device now
