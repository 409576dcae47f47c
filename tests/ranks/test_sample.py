"""The step loop on any layout equals a plain loop over stock forwards on one process."""

import pytest
import torch

from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.messages import Decode, EncodeText, Progress
from parallel_backend.samplers.samplers import SAMPLERS
from tests.ranks import driver, requests
from tests.ranks.requests import Case
from tests.support import tiny

CLOSE = 1e-4
"""Rounding grows over the steps of a loop with guidance."""

SIZES = tiny.Tiny(heads=3)
LAYOUTS = [
    (1, ""),
    (2, "ulysses=2"),
    (3, "ulysses=3"),
    (2, "cfg=2"),
    (2, "data=2"),
    (3, "data=3"),
    (4, "cfg=2 ulysses=2"),
    (4, "data=2 cfg=2"),
    (4, "data=2 ulysses=2"),
    (3, "ulysses=2"),
    (4, None),
    (3, None),
]


def run(pools, path, ranks, layout, case, **options):
    message, tensors = requests.sample(requests.spec(path, layout), case, **options)
    return pools(ranks).run(driver.handle, message, tensors)


@pytest.mark.parametrize(("ranks", "layout"), LAYOUTS)
@pytest.mark.parametrize("batch", [2, 3])
@pytest.mark.daily(9)
def test_layout_equals_plain_loop(pools, checkpoints, ranks, layout, batch):
    case = Case(batch=batch)
    answers = run(pools, checkpoints(heads=3), ranks, layout, case)
    assert [answer["error"] for answer in answers] == [None] * ranks
    wanted = requests.stock_sample(SIZES, case)
    assert requests.relative_error(answers[0]["tensors"]["samples"], wanted) <= CLOSE
    assert all(not answer["tensors"] for answer in answers[1:])


@pytest.mark.parametrize("sampler", [name for name in SAMPLERS if name != "euler"])
@pytest.mark.daily(4)
def test_samplers_on_cfg_and_ulysses_and_on_data(pools, checkpoints, sampler):
    layout, batch = ("data=2", 3) if SAMPLERS[sampler].noise else ("cfg=2 ulysses=2", 1)
    case, ranks = Case(batch=batch), ParallelLayout.parse(layout).ranks
    answers = run(pools, checkpoints(heads=3), ranks, layout, case, sampler=sampler)
    assert [answer["error"] for answer in answers] == [None] * ranks
    wanted = requests.stock_sample(SIZES, case, sampler=sampler)
    assert requests.relative_error(answers[0]["tensors"]["samples"], wanted) <= CLOSE


def test_without_guidance_the_second_branch_is_left_out(pools, checkpoints):
    answers = run(pools, checkpoints(heads=3), 2, "ulysses=2", Case(), cfg=1.0)
    wanted = requests.stock_sample(SIZES, Case(), cfg=1.0)
    assert requests.relative_error(answers[0]["tensors"]["samples"], wanted) <= CLOSE
    assert [answer["steps"] for answer in answers] == [3, 3]


def test_both_cfg_groups_compute_in_every_step(pools, checkpoints):
    answers = run(pools, checkpoints(heads=3), 2, "cfg=2", Case(texts=(9, 4)))
    assert [answer["steps"] for answer in answers] == [3, 3]


@pytest.mark.parametrize(("ranks", "layout"), [(1, ""), (4, "data=2 cfg=2"), (3, "data=3")])
@pytest.mark.parametrize("mask_batch", [1, 2])
def test_inpainting_keeps_what_is_masked(pools, checkpoints, ranks, layout, mask_batch):
    message, tensors = requests.sample(requests.spec(checkpoints(heads=3), layout), Case())
    generator = torch.Generator().manual_seed(7)
    kept = torch.randn(tensors["x"].shape, generator=generator)
    noise = torch.randn(tensors["x"].shape, generator=generator)
    mask = torch.zeros(mask_batch, 1, 1, *tensors["x"].shape[3:])
    mask[..., 3:] = 1.0
    tensors |= {"mask": mask, "noise": noise, "latent": kept, "x": noise.clone()}
    answers = pools(ranks).run(driver.handle, message, tensors)
    alone = pools(1).run(driver.handle, *_with_layout(message, tensors))
    samples = answers[0]["tensors"]["samples"]
    assert torch.allclose(samples[..., :3], kept[..., :3], atol=1e-5)
    assert requests.relative_error(samples, alone[0]["tensors"]["samples"]) <= CLOSE
    assert not torch.allclose(samples[..., 3:], kept[..., 3:], atol=0.1)


def test_what_is_kept_is_noised_or_clean(pools, checkpoints):
    message, tensors = requests.sample(requests.spec(checkpoints(heads=3), "ulysses=2"), Case())
    generator = torch.Generator().manual_seed(7)
    kept, noise = (torch.randn(tensors["x"].shape, generator=generator) for _ in range(2))
    mask = torch.zeros(1, 1, 1, *tensors["x"].shape[3:])
    mask[..., 3:] = 1.0
    clean = tensors | {"mask": mask, "latent": kept}
    # Noise that is the latent itself leaves it as it is at every sigma of a flow model.
    same, noised = clean | {"noise": kept}, clean | {"noise": noise}
    answers = [pools(2).run(driver.handle, message, given)[0]["tensors"]["samples"] for given in (clean, same, noised)]
    assert requests.relative_error(answers[0], answers[1]) <= CLOSE
    assert requests.relative_error(answers[0], answers[2]) > 100 * CLOSE


def _with_layout(message, tensors):
    model = requests.spec(message.model.path, "", ranks=1)
    plain, _ = requests.sample(model, Case())
    return plain, tensors


def test_progress_and_previews_come_from_rank_0(pools, checkpoints):
    answers = run(pools, checkpoints(heads=3), 2, "data=2", Case(), previews=True)
    reports = answers[0]["reports"]
    assert [progress for progress, _ in reports] == [Progress(phase="sampling", value=i + 1, total=3) for i in range(3)]
    assert all(extra["preview"].shape == (1, 16, 1, 5, 7) for _, extra in reports)
    last, samples = reports[-1][1]["preview"], answers[0]["tensors"]["samples"]
    assert torch.allclose(last, samples[:1, :, :1], atol=1e-5), "the last predicted x0 is the euler sample"
    assert not answers[1]["reports"]
    assert not any(extra for _, extra in run(pools, checkpoints(heads=3), 2, "data=2", Case())[0]["reports"])


def test_cancel_ends_all_ranks_at_the_same_step(pools, checkpoints):
    message, tensors = requests.sample(requests.spec(checkpoints(heads=3), "cfg=2 ulysses=2"), Case())
    answers = pools(4).run(driver.handle, message, tensors, cancel_after=1)
    assert [answer["error"] for answer in answers] == ["Cancelled: sampling was cancelled"] * 4
    assert [answer["steps"] for answer in answers] == [1, 1, 1, 1]
    again = pools(4).run(driver.handle, message, tensors)
    assert [answer["error"] for answer in again] == [None] * 4


def test_weights_load_once_whatever_changes(pools, checkpoints):
    path = checkpoints(heads=3, seed=5)
    spec = requests.spec(path, ranks=2)
    first = [
        requests.sample(requests.spec(path, "ulysses=2"), Case()),
        (EncodeText(model=spec), {"ids": torch.tensor([[3, 4, 1]]), "lengths": torch.tensor([3])}),
        (Decode(model=spec), {"latent": torch.zeros(1, 16, 1, 4, 4)}),
    ]
    again = [
        longer(requests.sample(requests.spec(path, "ulysses=2"), Case(seed=2))),
        (EncodeText(model=spec), {"ids": torch.tensor([[5, 1]]), "lengths": torch.tensor([2])}),
        (Decode(model=spec), {"latent": torch.ones(2, 16, 2, 6, 4)}),
        requests.sample(requests.spec(path, "cfg=2"), Case(seed=1, size=(1, 8, 8), texts=(3, 12))),
        requests.sample(requests.spec(path, "data=2"), Case(batch=3), sampler="heun"),
        requests.forward(requests.spec(path), Case(batch=1, texts=(5,))),
    ]
    for message, tensors in [*first, *again]:
        answers = pools(2).run(driver.handle, message, tensors)
        assert [answer["error"] for answer in answers] == [None, None]
    loaded = [[model for model in answer["models"] if model.path == str(path)] for answer in answers]
    assert [[(m.parts, m.loads) for m in models] for models in loaded] == [
        [(("text_encoder", "transformer", "vae"), 3)],
        [(("transformer", "vae"), 2)],
    ]


def longer(request):
    """The same with more steps."""
    message, tensors = request
    return message, tensors | {"sigmas": torch.linspace(1.0, 0.0, 7)}
