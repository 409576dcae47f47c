"""Blocks stream from the machine's memory where the devices have no room for them, and the results stay the same."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from parallel_backend.checkpoint.opening import open_checkpoint
from parallel_backend.engine.validation import check_sample
from parallel_backend.engine.working_memory import forward_bytes
from parallel_backend.families.shared.patchify import pad_to_patch
from parallel_backend.protocol.messages import EncodeText, Unload
from parallel_backend.protocol.tensors import describe
from tests.ranks import driver, requests, test_weight_changes
from tests.ranks.requests import Case
from tests.support import tiny
from tests.support.weight_changes import Change, write_overlay

LARGE = {"heads": 3, "layers": 40, "seed": 11}
SIZES = tiny.Tiny(heads=3, layers=40, seed=11)
CHANGED = tiny.Tiny(heads=3, layers=7, seed=12)
TOLERANCE = 1e-5


@pytest.fixture
def limit(pools):
    """``limit(ranks, bytes)`` limits the memory of each rank of a pool."""
    limited = []

    def set_limit(ranks, nbytes):
        limited.append(ranks)
        pools(ranks).run(driver.limit_memory, nbytes)

    yield set_limit
    for ranks in limited:
        pools(ranks).run(driver.limit_memory, None)


def weights_of(sizes):
    """Bytes of a tiny transformer."""
    return sum(parameter.nbytes for parameter in tiny.transformer(sizes).parameters())


def work_of(path, layout, ranks, case):
    """The bytes that a rank's tensors take, by the estimate."""
    message, tensors = requests.sample(requests.spec(path, layout, ranks=ranks), case)
    plan = check_sample(message, describe(tensors), open_checkpoint(path), ranks)
    return max(forward_bytes("WanTransformer3DModel", plan, rank, 4) for rank in range(plan.layout.ranks))


def note_of(answer, path):
    """What a rank says about a model."""
    return next(model.note for model in answer["models"] if model.path == str(path))


def matches(answers, wanted):
    """Whether every rank succeeded and the latent is the wanted one."""
    errors = [answer["error"] for answer in answers]
    assert errors == [None] * len(answers), errors
    return requests.relative_error(answers[0]["tensors"]["samples"], wanted) <= TOLERANCE


SHARED = [
    pytest.param(2, "ulysses=2", marks=pytest.mark.long),
    (2, "cfg=2"),
    (2, "tensor=2"),
    (2, "pipe=2 patches=1"),
    (2, "ulysses=2 shard_weights"),
    (3, "ring=3"),
    (3, "data=3"),
]


@pytest.mark.parametrize(("ranks", "layout"), SHARED)
@pytest.mark.daily(2)
def test_a_model_of_more_than_all_limits_together_samples_the_same(pools, checkpoints, limit, ranks, layout):
    path, case = checkpoints(**LARGE), Case()
    limit(ranks, int(weights_of(SIZES) / ranks / 2.5) + work_of(path, layout, ranks, case) * 5 // 4)
    message, tensors = requests.sample(requests.spec(path, layout, ranks=ranks), case)
    wanted = requests.stock_sample(SIZES, case)
    for _ in range(2):
        answers = pools(ranks).run(driver.handle, message, tensors)
        assert matches(answers, wanted)
    assert "stream from the machine's memory" in note_of(answers[0], path)
    assert any("stream from" in progress.note for progress, _ in answers[0]["reports"])


@pytest.fixture(scope="module")
def lora(tmp_path_factory) -> Change:
    return Change.write(tmp_path_factory.mktemp("lora"), tiny.transformer(CHANGED), seed=1, rank=2, strength=0.7)


@pytest.mark.parametrize(
    ("ranks", "layout"), [(3, "ulysses=3"), (3, "tensor=3"), (2, "pipe=2 patches=1"), (2, "cfg=2")]
)
def test_loras_and_overlays_change_what_streams_and_are_undone(
    pools, checkpoints, lora, streaming, tmp_path, ranks, layout
):
    streaming(ranks)
    path, model = checkpoints(heads=3, layers=7, seed=12), tiny.transformer(CHANGED)
    names = [name for name in model.state_dict() if "blocks.0" in name or "blocks.5" in name or "proj_out" in name]
    overlay, replaced = write_overlay(tmp_path, model, names)
    check = partial(test_weight_changes.check, pools, path, ranks, layout, sizes=CHANGED)
    check(((), ()))
    check(((lora,), ()), overlay, replaced)
    pools(ranks).run(driver.drop, str(path), "transformer", (0,))
    check(((lora,), ()), overlay, replaced)
    pools(ranks).run(driver.drop, str(path), "transformer", (ranks - 1,))
    check(((), ()))


def test_ranks_keep_a_part_once_and_find_it_after_they_dropped_theirs(pools, checkpoints, streaming):
    streaming(3)
    path, case = checkpoints(**LARGE), Case()
    wanted = requests.stock_sample(SIZES, case)
    message, tensors = requests.sample(requests.spec(path, "ulysses=3"), case)
    assert matches(pools(3).run(driver.handle, message, tensors), wanted)
    held = pools(3).run(driver.cpu_memory, str(path))
    assert held == [held[0]] * 3
    pools(3).run(driver.drop, str(path), "transformer", (1,))
    answers = pools(3).run(driver.handle, message, tensors)
    assert matches(answers, wanted)
    assert pools(3).run(driver.cpu_memory, str(path)) == held, "it was read again"
    for layout in ("tensor=3", "ulysses=2", "ring=3"):
        message, tensors = requests.sample(requests.spec(path, layout), case)
        assert matches(pools(3).run(driver.handle, message, tensors), wanted)
    pools(3).run(driver.handle, Unload(model=message.model), {})
    assert pools(3).run(driver.cpu_memory, str(path)) == [[], [], []]


def test_skipped_blocks_do_not_confuse_those_that_stream(pools, checkpoints, streaming):
    streaming(2)
    path, case = checkpoints(heads=3, layers=7, seed=12), Case(texts=(9, 9))
    message, tensors = requests.forward(requests.spec(path, "ulysses=2"), case)
    whole, without = (), (1, 2, 4)
    answers = pools(2).run(driver.handle, replace(message, skipped=(whole, without)), tensors)
    again = pools(2).run(driver.handle, replace(message, skipped=(without, whole)), tensors)
    assert [answer["error"] for answer in (*answers, *again)] == [None] * 4
    for branch, skipped in (("0", ()), ("1", without)):
        model = tiny.transformer(CHANGED)
        model.blocks = torch.nn.ModuleList(block for i, block in enumerate(model.blocks) if i not in skipped)
        with torch.no_grad():
            padded = pad_to_patch(case.latent, CHANGED.patch)
            out = model(padded, case.timestep, case.text(int(branch)), return_dict=False)[0][:, :, :3, :5, :7]
        assert requests.relative_error(answers[0]["tensors"][branch], out) <= TOLERANCE


@pytest.mark.parametrize("layout", ["ulysses=3", "data=3"])
def test_a_rank_that_was_idle_sees_what_the_others_changed(pools, checkpoints, streaming, tmp_path, layout):
    streaming(3)
    path, model = checkpoints(heads=3, layers=7, seed=12), tiny.transformer(CHANGED)
    overlay, replaced = write_overlay(tmp_path, model, [name for name in model.state_dict() if "blocks.3" in name])
    check = partial(test_weight_changes.check, pools, path, 3, sizes=CHANGED)
    check(layout, ((), ()))
    check("ulysses=2", ((), ()), overlay, replaced)
    check(layout, ((), ()))
    check("ulysses=2", ((), ()), overlay, replaced)
    check(layout, ((), ()), overlay, replaced)


def test_what_streams_is_freed_with_its_memory(pools, checkpoints, streaming):
    streaming(2)
    path = checkpoints(heads=3, layers=7, seed=12)
    message, tensors = requests.forward(requests.spec(path, "ulysses=2", ranks=2), Case())
    pools(2).run(driver.handle, message, tensors)
    assert pools(2).run(driver.dropped_memory, str(path)) == [(False, 0), (False, 0)]


def test_a_layout_that_fits_leaves_no_memory_behind(pools, checkpoints, limit):
    path, case = checkpoints(**LARGE), Case()
    wanted = requests.stock_sample(SIZES, case)
    limit(2, int(weights_of(SIZES) * 0.7) + work_of(path, "tensor=2", 2, case) * 5 // 4)
    for layout, streams in (("ulysses=2", True), ("tensor=2", False), ("ulysses=2", True)):
        answers = pools(2).run(driver.handle, *requests.sample(requests.spec(path, layout, ranks=2), case))
        assert matches(answers, wanted)
        assert [bool(note_of(answer, path)) for answer in answers] == [streams] * 2
        assert [bool(held) for held in pools(2).run(driver.cpu_memory, str(path))] == [streams] * 2


def test_ranks_agree_whatever_only_one_of_them_knows(pools, checkpoints):
    """Rank 0 alone encodes text, which makes it know the model under another name than the others do."""
    path = checkpoints(heads=4)
    automatic, named = requests.spec(path, ranks=2), replace(requests.spec(path, ranks=2), dtype="float32")
    text = {"ids": torch.tensor([[3, 4, 1]]), "lengths": torch.tensor([3])}
    for message, given in (
        (EncodeText(model=automatic), text),
        requests.forward(named, Case()),
        (Unload(model=named), {}),
        requests.forward(automatic, Case()),
    ):
        answers = pools(2).run(driver.handle, message, given)
        assert [answer["error"] for answer in answers] == [None, None]
