"""Memory and traffic of a rank in a ring, measured at the dispatcher."""

import gc

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from parallel_backend.attention.kernels import KERNELS, Kernel, Sdpa
from parallel_backend.checkpoint.opening import open_checkpoint
from parallel_backend.distributed.sent_bytes import SentBytes
from parallel_backend.engine.validation import check_forward
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.tensors import describe
from parallel_backend.strategies.ring import Ring, RingAttention
from tests.ranks import driver, requests
from tests.ranks.requests import Case

HEADS, HEAD_DIM, QUERIES = 2, 8, 3
SIZES = (50, 71, 64, 93)
"""Tokens of each rank. None equals ``QUERIES``, so the size of a storage tells whether it holds keys or values."""


class Alive(TorchDispatchMode):
    """Counts how many storages of given sizes are alive at once; ``most`` is the maximum."""

    def __init__(self, sizes):
        super().__init__()
        self.sizes, self.seen, self.most = set(sizes), {}, 0

    def watch(self, *tensors):
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage.nbytes() in self.sizes:
                self.seen[storage._cdata] = StorageWeakRef(storage)
        self.seen = {key: ref for key, ref in self.seen.items() if not ref.expired()}
        self.most = max(self.most, len(self.seen))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.watch(*(each for each in (out if isinstance(out, (tuple, list)) else [out]) if torch.is_tensor(each)))
        return out


def most_blocks(rank, layout, hoard, held=False):
    """Run ring attention.

    Args:
        layout: a layout with a ring.
        hoard: whether the kernel keeps a copy of every block.
        held: whether the caller holds the keys and values that it passes, as a module does.

    Returns:
        The largest number of key and value tensors alive at once, and the error against attention to all keys.
    """
    devices = driver.mesh(rank, layout)
    sizes = (50,) * devices.layout.ring if held else SIZES[: devices.layout.ring]
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, HEADS, QUERIES, HEAD_DIM, generator=generator)
    whole = [torch.randn(1, sum(sizes), HEADS, HEAD_DIM, generator=generator).transpose(1, 2) for _ in range(2)]
    wanted = torch.nn.functional.scaled_dot_product_attention(query, whole[0], whole[1])
    local = [part.split(sizes, dim=2)[rank].transpose(1, 2).clone().transpose(1, 2) for part in whole]
    kernel: Kernel = Hoarding() if hoard else KERNELS["sdpa"]
    ring = RingAttention(devices.axes["ring"], sizes, [None] * len(sizes), kernel)
    gc.collect()
    with torch.inference_mode(), Alive([HEADS * HEAD_DIM * tokens * 4 for tokens in sizes]) as alive:
        alive.watch(*local)
        # Called this way, only the ring refers to the arguments, unless ``module`` holds them too.
        module = list(local) if held else []
        out = RingAttention.__call__(ring, query, local.pop(0), local.pop(0), scale=None, sample=None)
        del module
    return alive.most, float((out - wanted).abs().max())


class Hoarding(Sdpa):
    """A kernel that keeps a copy of its keys and values, as gathering all keys would."""

    def __init__(self):
        self.copies = []

    def with_lse(self, query, key, value, scale):
        self.copies.append((key.clone(), value.clone()))
        return super().with_lse(query, key, value, scale)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_ring_holds_at_most_two_blocks_of_keys_and_values(pools, ranks):
    measured = pools(ranks).run(most_blocks, f"ring={ranks}", False)
    assert [most for most, _ in measured] == [4] * ranks  # keys and values of two blocks
    assert all(error < 1e-5 for _, error in measured)


@pytest.mark.parametrize("ranks", [3, 4])
def test_a_ring_holds_two_blocks_if_the_module_holds_its_own_too(pools, ranks):
    measured = pools(ranks).run(most_blocks, f"ring={ranks}", False, True)
    assert [most for most, _ in measured] == [4] * ranks
    assert all(error < 1e-5 for _, error in measured)


def test_the_measurement_sees_blocks_that_a_kernel_keeps(pools):
    assert all(most >= 8 for most, _ in pools(4).run(most_blocks, "ring=4", True))


def kinds_in_blocks(rank, message, tensors):
    """Return the bytes that a rank's blocks sent in one forward, by the operator's name."""
    driver.handle(rank, message, tensors)  # loads the weights
    (pipeline,) = (p for key, p in driver.engine(rank)._models.items() if key[0] == message.model.path)
    family, sent = pipeline.parts._parts["transformer"], SentBytes()
    run = family.run

    def counted(state):
        with sent:
            return run(state)

    family.run = counted
    try:
        answer = driver.handle(rank, message, tensors)
    finally:
        family.run = run
    return answer["error"], dict(sent.by_kind)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_blocks_pass_keys_and_values_on_and_gather_none(pools, checkpoints, ranks):
    path, case = checkpoints(heads=3), Case(texts=(9,))
    message, tensors = requests.forward(requests.spec(path, f"ring={ranks}", ranks=ranks), case)
    answers = pools(ranks).run(kinds_in_blocks, message, tensors)
    layout = ParallelLayout(ring=ranks)
    workload = check_forward(message, describe(tensors), open_checkpoint(path), ranks).workload()
    for rank, (error, kinds) in enumerate(answers):
        assert error is None
        assert {kind for kind, count in kinds.items() if count} == {"send"}
        assert kinds["send"] == Ring().bytes_sent(layout, workload, rank)
