"""What a recorder notes of operators on stand-in tensors."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.stand_in.gpu import Gpu
from tests.support.stand_in.tensor import StandIn

GPU = "cuda:0"


@pytest.fixture
def recorder():
    gpu = Gpu(0)
    with torch.inference_mode(), gpu as recorder:
        yield recorder


def on_gpu(recorder, *shape):
    """A tensor whose way to the GPU is forgotten."""
    tensor = torch.arange(float(torch.Size(shape).numel())).view(shape).to(GPU)
    recorder.begin()
    return tensor


def test_a_tensor_says_that_it_is_on_a_gpu_and_computes(recorder):
    x = on_gpu(recorder, 2, 3)
    assert (x.device, x.is_cuda, x.is_cpu) == (torch.device(GPU), True, False)
    y = F.linear(x, x)[:, 0]
    assert isinstance(y, StandIn)
    assert y.tolist() == [5.0, 14.0]


def test_views_and_writes_share_memory(recorder):
    x = on_gpu(recorder, 2, 3)
    x.view(-1)[1:3] = 7
    x[0, 0].add_(5)
    assert x.tolist() == [[5.0, 7.0, 7.0], [3.0, 4.0, 5.0]]


def test_modules_move(recorder):
    layer = nn.Linear(3, 2).to("cuda")
    assert layer.weight.device == torch.device(GPU)
    assert layer(on_gpu(recorder, 1, 3)).is_cuda


MIXES = {
    "add": lambda x, cpu: x + cpu,
    "matmul": lambda x, cpu: x @ cpu.T,
    "cat": lambda x, cpu: torch.cat([x, cpu]),
    "where": lambda x, cpu: torch.where(cpu > 0, x, x),
    "gather": lambda x, cpu: x.gather(1, torch.tensor([[0]])),
    "generator": lambda x, cpu: torch.randn(3, device=GPU, generator=torch.Generator()),
    "another GPU": lambda x, cpu: torch.zeros(3, device="cuda:1") + 1,
}


@pytest.mark.parametrize("name", MIXES)
def test_mixed_devices_are_noted(recorder, name):
    MIXES[name](on_gpu(recorder, 2, 3), torch.ones(2, 3))
    assert recorder.notes.mixed


ALLOWED = {
    "number": lambda x: x * torch.tensor(2.0),
    "filled": lambda x: x.fill_(torch.tensor(2.0)),
    "copy": lambda x: x.copy_(torch.ones(2, 3)),
    "index": lambda x: x[torch.tensor([0, 1])],
    "generator": lambda x: torch.randn(3, device=GPU, generator=torch.Generator(device=GPU)),
    "CPU alone": lambda x: torch.ones(3) + torch.ones(3),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_torch_allows_is_not_noted(recorder, name):
    ALLOWED[name](on_gpu(recorder, 2, 3))
    assert recorder.notes.mixed == []


WAITING = {
    "reads a number": [
        lambda x: x[0, 0].item(), lambda x: bool((x > 1).all()), lambda x: torch.equal(x, x.clone()),
    ],
    "needs a size": [
        lambda x: x.nonzero(), lambda x: torch.unique(x), lambda x: torch.masked_select(x, x > 1),
        lambda x: x.repeat_interleave(x[0].long(), dim=1),
    ],
    "counts a mask": [lambda x: x[x > 1], lambda x: x.index_put_([x > 1], x[x > 1])],
    "copies to the CPU": [lambda x: x.cpu(), lambda x: x.tolist(), lambda x: torch.zeros(2, 3).copy_(x)],
    "copies to the GPU": [
        lambda x: torch.ones(3).to(GPU), lambda x: torch.tensor([1.0], device=GPU), lambda x: x.new_tensor([1.0]),
        lambda x: x.copy_(torch.ones(2, 3)), lambda x: torch.ones(1).cuda(),
    ],
    "copies an index to the GPU": [lambda x: x[torch.tensor([0, 1])]],
    "reads a status": [lambda x: torch.linalg.solve(x[:, :2] + torch.eye(2, device=GPU), x[:, 0])],
    "waits for the GPU": [lambda x: torch.cuda.synchronize(), lambda x: torch.cuda.current_stream().synchronize()],
}  # fmt: skip


@pytest.mark.parametrize(("why", "work"), [(why, work) for why, works in WAITING.items() for work in works])
def test_waits_are_noted(recorder, why, work):
    x = on_gpu(recorder, 2, 3)
    work(x)
    assert why in {wait.why for wait in recorder.notes.waits}, recorder.notes.waits


WITHOUT = [
    lambda x: x.masked_fill(x > 1, 0.0),
    lambda x: x.to(torch.bfloat16) + x.sum(),
    lambda x: x.index_put_([x > 1], torch.zeros((), device=GPU)),
    lambda x: torch.ones(3).to(GPU, non_blocking=True),
    lambda x: x.copy_(torch.ones(2, 3), non_blocking=True),
    lambda x: torch.arange(3, device=GPU),
    lambda x: x.repeat_interleave(2),
    lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    lambda x: torch.ones(3).sum().item(),
    lambda x: x * 2.0 if x.shape[0] else x,
]


@pytest.mark.parametrize("work", WITHOUT)
def test_what_waits_for_nothing(recorder, work):
    work(on_gpu(recorder, 2, 3))
    assert recorder.notes.waits == []


def test_torch_is_as_before_after_a_recording(recorder):
    available = torch.cuda.is_available
    with Gpu(1):
        assert torch.cuda.current_device() == 1
    assert torch.cuda.is_available is available
    assert torch.cuda.current_device() == 0
