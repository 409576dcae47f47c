"""GPUs by name, slices of GPUs, AMD's, and devices on which ranks do not run. What torch reports is faked."""

import re

import pytest
import torch

from parallel_backend.client import gpus
from parallel_backend.client.devices import choose_devices, parse_devices, ranks_of
from parallel_backend.errors import InvalidRequest
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.model_spec import VISIBLE, Devices

NEEDS = ranks_of([ParallelLayout(ring=2)])


@pytest.fixture
def machine(monkeypatch):
    """``machine(cards, other="xpu", hip=..., NAME="value")`` is what torch and the environment report."""

    def report(cards=0, *, other="cuda", hip=None, **variables):
        for name in (*VISIBLE, "PARALLEL_DIT_CPU_RANKS", "PARALLEL_DIT_COLLECTIVES"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cards > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: cards > 0 or other != "cuda")
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(other))

    return report


def test_gpus_may_be_listed_by_name_and_ranks_count_in_the_list(machine):
    machine(2, CUDA_VISIBLE_DEVICES="GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,GPU-4a")
    visible = (("CUDA_VISIBLE_DEVICES", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,GPU-4a"),)
    assert parse_devices("1,0") == Devices(kind="cuda", indices=(1, 0), visible=visible)


@pytest.mark.parametrize(("seen", "said"), [(0, "none of them"), (1, "only 1 of them")])
@pytest.mark.parametrize("text", ["all", "0"])
def test_names_of_which_torch_sees_fewer_are_refused_instead_of_running_on_less(machine, seen, said, text):
    machine(seen, CUDA_VISIBLE_DEVICES="GPU-89,GPU-89")
    with pytest.raises(InvalidRequest, match=rf"^CUDA_VISIBLE_DEVICES=GPU-89,GPU-89: torch sees {said}; .*nvidia-smi"):
        parse_devices(text)


@pytest.mark.parametrize("value", ["0,1,2,3", "", "-1", "NoDevFiles"])
def test_numbers_of_missing_gpus_end_the_list_as_in_cuda(machine, value):
    machine(1, CUDA_VISIBLE_DEVICES=value)
    assert parse_devices("all").indices == (0,)


def test_one_slice_of_a_gpu_is_a_gpu(machine):
    machine(1, CUDA_VISIBLE_DEVICES="MIG-1")
    assert parse_devices("all") == Devices(kind="cuda", indices=(0,), visible=(("CUDA_VISIBLE_DEVICES", "MIG-1"),))
    with pytest.raises(InvalidRequest, match="there is no device 1"):
        parse_devices("0,1")
    machine(1, CUDA_VISIBLE_DEVICES="MIG-1", PARALLEL_DIT_COLLECTIVES="gloo")
    assert parse_devices("0,0").indices == (0, 0)


@pytest.mark.parametrize("text", ["all", "0", "0,1"])
def test_several_slices_are_refused_since_a_process_sees_only_one(machine, text):
    machine(1, CUDA_VISIBLE_DEVICES="MIG-1,MIG-2")
    with pytest.raises(InvalidRequest, match=r"names 2 MIG slices, and a process sees only the first.*gloo.*\"0,0\""):
        parse_devices(text)


def test_amd_gpus_are_what_torch_calls_cuda(machine):
    machine(2, hip="6.4", HIP_VISIBLE_DEVICES="3,1", ROCR_VISIBLE_DEVICES="0,1,2,3")
    visible = (("HIP_VISIBLE_DEVICES", "3,1"), ("ROCR_VISIBLE_DEVICES", "0,1,2,3"))
    assert parse_devices("all") == Devices(kind="cuda", indices=(0, 1), visible=visible)
    for word in ("hip:0", "rocm:1", "HIP"):
        with pytest.raises(InvalidRequest, match=r"AMD GPUs, which torch calls cuda; .*cuda:0,cuda:1 would work"):
            parse_devices(word)


def test_names_of_amd_gpus_are_read_where_rocm_reads_them(machine):
    machine(2, hip="6.4", HIP_VISIBLE_DEVICES="GPU-1,GPU-2", ROCR_VISIBLE_DEVICES="GPU-1,GPU-2,GPU-3")
    assert len(parse_devices("all").indices) == 2
    machine(1, hip="6.4", ROCR_VISIBLE_DEVICES="GPU-1,GPU-2")
    with pytest.raises(InvalidRequest, match=r"^ROCR_VISIBLE_DEVICES=GPU-1,GPU-2: torch sees only 1 of them"):
        parse_devices("all")


@pytest.mark.parametrize(
    ("kind", "name"), [("xpu", "Intel GPUs"), ("mps", "Apple GPUs"), ("hpu", "Gaudi"), ("mtia", "MTIA")]
)
def test_other_accelerators_are_refused_and_cpu_ranks_beside_them_have_to_be_asked_for(machine, kind, name):
    machine(other=kind)
    for text in ("all", "0,1"):
        with pytest.raises(InvalidRequest, match=rf"has {name}.* \({kind}\), on which ranks do not run; .*would work"):
            parse_devices(text)
    with pytest.raises(InvalidRequest, match=name):
        choose_devices(None, NEEDS)
    machine(other=kind, PARALLEL_DIT_CPU_RANKS="3")
    assert parse_devices("all") == Devices(kind="cpu", indices=(0, 1, 2))
    assert parse_devices("0,1") == choose_devices(None, NEEDS) == Devices(kind="cpu", indices=(0, 1))


@pytest.mark.parametrize("cards", [0, 2])
@pytest.mark.parametrize("word", ["xpu", "xpu:0", "mps", "npu:1", "hpu"])
def test_devices_on_which_ranks_do_not_run_are_refused_by_name(machine, cards, word):
    machine(cards)
    kind = re.escape(f"({word.partition(':')[0]})")
    with pytest.raises(InvalidRequest, match=f"devices '0,{word}': ranks do not run on .*{kind}; .*would work"):
        parse_devices(f"0,{word}")


def test_a_machine_without_any_accelerator_has_cpu_ranks(machine):
    machine()
    assert parse_devices("all") == parse_devices("0,1") == Devices(kind="cpu", indices=(0, 1))


def test_torchs_own_answer_is_understood():
    assert gpus.other_accelerator() == ""
