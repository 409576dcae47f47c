"""The user's choice of devices, with and without GPUs."""

import pytest
import torch

from parallel_backend.client.devices import choose_devices, parse_devices, ranks_of
from parallel_backend.errors import InvalidRequest
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.model_spec import VISIBLE, Devices


@pytest.fixture(params=[0, 3])
def gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    count: int = request.param
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    for name in ("PARALLEL_DIT_CPU_RANKS", "PARALLEL_DIT_COLLECTIVES", *VISIBLE):
        monkeypatch.delenv(name, raising=False)
    return count


def test_all(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = Devices(kind="cuda", indices=(0, 1, 2)) if gpus else Devices(kind="cpu", indices=(0, 1))
    assert parse_devices("all") == parse_devices(" ALL ") == expected
    monkeypatch.setenv("PARALLEL_DIT_CPU_RANKS", "4")
    assert len(parse_devices("all").indices) == (3 if gpus else 4)


def test_a_list(gpus: int) -> None:
    assert parse_devices("2, 0") == Devices(kind="cuda" if gpus else "cpu", indices=(2, 0))
    if gpus:
        assert parse_devices("cuda:1,cuda:2") == Devices(kind="cuda", indices=(1, 2))


@pytest.mark.parametrize("text", ["", "0,", "-1", "gpu", "cuda", "cuda:x", "0;1", "1e3", "0.5", "99999", "²"])
def test_junk(gpus: int, text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"is not a device; .*would work"):
        parse_devices(text)


def test_missing_and_repeated_devices(gpus: int) -> None:
    missing = "3" if gpus else "16"
    with pytest.raises(InvalidRequest, match=f"there is no device {missing}; .*would work"):
        parse_devices(f"0,{missing}")
    with pytest.raises(InvalidRequest, match="1 is listed twice"):
        parse_devices("1,0,1")
    if not gpus:
        with pytest.raises(InvalidRequest, match="there is no GPU here"):
            parse_devices("cuda:1")


@pytest.mark.parametrize("ranks", ["0", "17", "two", "-1"])
def test_a_bad_number_of_cpu_ranks(monkeypatch: pytest.MonkeyPatch, ranks: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("PARALLEL_DIT_CPU_RANKS", ranks)
    with pytest.raises(InvalidRequest, match=f"PARALLEL_DIT_CPU_RANKS={ranks}.*from 1 to 16"):
        parse_devices("all")


def test_numbers_count_in_the_visible_devices(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,3,1")
    assert parse_devices("all").visible == ((("CUDA_VISIBLE_DEVICES", "5,3,1"),) if gpus else ())
    assert parse_devices("0,2").visible == ((("CUDA_VISIBLE_DEVICES", "5,3,1"),) if gpus else ())


def test_gloo_takes_a_gpu_twice(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARALLEL_DIT_COLLECTIVES", "gloo")
    if not gpus:
        assert parse_devices("0,1").collectives == "nccl"  # there are no GPUs that could use gloo
        with pytest.raises(InvalidRequest, match="0 is listed twice"):
            parse_devices("0,0")
        return
    assert parse_devices("0,0,1") == Devices(kind="cuda", indices=(0, 0, 1), collectives="gloo")
    assert parse_devices("all") == Devices(kind="cuda", indices=(0, 1, 2), collectives="gloo")
    with pytest.raises(InvalidRequest, match="there is no device 3"):
        parse_devices("0,0,3")
    monkeypatch.setenv("PARALLEL_DIT_COLLECTIVES", "nccl")
    assert parse_devices("0") == Devices(kind="cuda", indices=(0,))
    with pytest.raises(InvalidRequest, match="0 is listed twice"):
        parse_devices("0,0")


@pytest.mark.parametrize("name", ["mpi", "Gloo", "gloo,nccl"])
def test_bad_collectives(gpus: int, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("PARALLEL_DIT_COLLECTIVES", name)
    with pytest.raises(InvalidRequest, match=f"PARALLEL_DIT_COLLECTIVES={name}: it must be nccl or gloo"):
        parse_devices("all")


def test_a_command_takes_as_many_devices_as_it_needs(gpus: int) -> None:
    kind, needs = "cuda" if gpus else "cpu", ranks_of([ParallelLayout(), ParallelLayout(ring=2)])
    assert choose_devices("2,1,0", needs) == Devices(kind=kind, indices=(2, 1))  # type: ignore[arg-type]
    assert choose_devices("all", needs) == choose_devices(None, needs) == Devices(kind=kind, indices=(0, 1))  # type: ignore[arg-type]
    if not gpus:  # not limited by what "all" means
        assert len(choose_devices(None, {"--ranks 5": 5}).indices) == 5


def test_too_few_devices_for_a_command(gpus: int) -> None:
    needs, unit = ranks_of([ParallelLayout(ring=2), ParallelLayout(ulysses=4)]), "GPU" if gpus else "CPU rank"
    with pytest.raises(InvalidRequest, match=f"^layout \"ulysses=4\" needs 4 ranks and --devices '0' means 1 {unit};"):
        choose_devices("0", needs)
    with pytest.raises(InvalidRequest, match="is not a device"):
        choose_devices("", needs)
    if gpus:
        with pytest.raises(InvalidRequest, match="'all' means 3 GPUs; CUDA_VISIBLE_DEVICES= for CPU ranks"):
            choose_devices(None, needs)
