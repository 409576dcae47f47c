"""Step loops of PipeFusion and displaced patch equal the same algorithm on one process, and the exact one where that
is what they are to be."""

from dataclasses import replace

import pytest
import torch

from lab.verify.forward import matrix
from lab.verify.loops import run as steps
from lab.verify.loops.run import SIGMAS, Loop
from parallel_backend.checkpoint.opening import open_checkpoint
from parallel_backend.engine.validation import check_sample
from parallel_backend.families.registry import family_of
from parallel_backend.layout.parallel_layout import ParallelLayout
from parallel_backend.protocol.model_spec import Devices
from parallel_backend.protocol.tensors import describe
from parallel_backend.verify import examples
from tests.ranks import driver, requests
from tests.ranks.requests import Case

CLOSE = 1e-4
FIRSTS = [
    pair for pair in examples.variants() if matrix.is_first_variant(*pair) and len(family_of(pair[0]).latents) == 1
]
"""One model of each family but those of picture and sound, which refuse patches."""
FLUX, WAN = ("FluxTransformer2DModel", "kontext"), ("WanTransformer3DModel", "ti2v 5b")
JOINT = ("SD3Transformer2DModel", "sd3.5 medium")
MASKED = ("HunyuanVideoTransformer3DModel", "t2v")


COMBINATIONS = [
    "pipe=3 patches=4", "cfg=2 pipe=2", "pipe=2 ulysses=2 patches=3", "pipe=2 patches=3 balance=1:3",
    "ring=3 stale=previous", "ring=2 ulysses=2 stale=previous", "ring=2 ulysses=2 stale=none",
    "data=2 pipe=2 patches=3", "cfg=2 ring=2 stale=previous", "cfg=2 ring=2 stale=none",
    "tensor=2 ring=2 stale=previous",
]  # fmt: skip


@pytest.fixture(scope="session")
def deep(tmp_path_factory):
    """``deep(class_name, variant)`` is the folder of a small model with layers enough for four stages."""
    written = {}

    def folder(name, kind):
        if (name, kind) not in written:
            written[name, kind] = examples.write_checkpoint(tmp_path_factory.mktemp("deep"), steps.module(name, kind))
        return written[name, kind]

    return folder


def loop(pair, layout, **options):
    return Loop(class_name=pair[0], variant=pair[1], layout=ParallelLayout.parse(layout), **options)


def run(pools, deep, asked, *, ranks=None, inpainting=None, **options):
    """The request, and what each rank answered."""
    ranks = ranks or asked.layout.ranks
    path = deep(asked.class_name, asked.variant)
    message = asked.message(path, Devices(kind="cpu", indices=tuple(range(ranks))))
    tensors = asked.tensors() | (inpainting or {})
    return message, tensors, pools(ranks).run(driver.handle, message, tensors, **options)


def check(pools, deep, asked, *, against=None, **options):
    """Compare with one process, in the layout's own algorithm or that of another layout."""
    message, tensors, answers = run(pools, deep, asked, **options)
    assert [answer["error"] for answer in answers] == [None] * len(answers)
    plan = check_sample(message, describe(tensors), open_checkpoint(message.model.path), len(answers))
    model = steps.family(asked.class_name, asked.variant)
    wanted = steps.reference_samples(lambda _: model, message, tensors, replace(plan, layout=against or plan.layout))
    got = answers[0]["tensors"]
    assert requests.relative_error(got["samples"], wanted) <= CLOSE
    assert got["sent_bytes"].tolist() == list(steps.expected_bytes(asked, message, tensors, plan))
    return got["samples"], wanted


def warmed(layout, count):
    return replace(ParallelLayout.parse(layout), warmup=count)


@pytest.mark.parametrize(
    ("pair", "layout"),
    [
        *((pair, "pipe=2 patches=3") for pair in FIRSTS),
        *((pair, "ring=2 stale=previous") for pair in FIRSTS[2::4]),
    ],
)
@pytest.mark.daily(7)
def test_every_family_is_the_algorithm(pools, deep, pair, layout):
    check(pools, deep, loop(pair, layout, sigmas=SIGMAS[::3] + SIGMAS[-1:], batch=1))


@pytest.mark.parametrize("layout", COMBINATIONS)
@pytest.mark.daily(4)
def test_combinations_with_odd_shapes(pools, deep, layout):
    check(pools, deep, loop(JOINT, layout, batch=3, sigmas=SIGMAS[::3]))


@pytest.mark.parametrize(
    ("pair", "layout"),
    [
        (MASKED, "pipe=2 ulysses=2 patches=3"), (MASKED, "ring=3 stale=previous"), (FLUX, "ring=2 stale=none"),
        (FLUX, "ring=2 pipe=2 patches=3"),
    ],
)  # fmt: skip
def test_references_and_masked_text(pools, deep, pair, layout):
    check(pools, deep, loop(pair, layout, sigmas=SIGMAS[::3]))


@pytest.mark.parametrize(
    ("sampler", "layout"),
    [
        *((name, "pipe=2 patches=3") for name in ("heun", "dpmpp_2m", "euler_ancestral", "dpmpp_2m_sde", "uni_pc")),
        *((name, "ring=2 stale=previous") for name in ("heun", "dpmpp_2m_sde")),
        ("lcm", "data=2 pipe=2 patches=3"),
    ],
)
@pytest.mark.daily(3)
def test_samplers(pools, deep, sampler, layout):
    check(pools, deep, loop(JOINT, layout, sampler=sampler, sigmas=SIGMAS[::2], batch=3))


@pytest.mark.parametrize("sampler", ["euler_ancestral", "dpmpp_2m_sde", "uni_pc"])
def test_samplers_with_all_steps_of_warm_up_are_exact(pools, deep, sampler):
    asked = loop(WAN, "pipe=3 patches=5 warmup=9", sampler=sampler, sigmas=SIGMAS[::2])
    x = asked.tensors()["x"]
    random = torch.Generator().manual_seed(3)
    inpainting = {
        "mask": (torch.rand(2, 1, *x.shape[2:], generator=random) > 0.5).float(),
        **{name: torch.randn(x.shape, generator=random) for name in ("latent", "noise")},
    }
    check(pools, deep, asked, against=ParallelLayout(pipe=2, patches=1), inpainting=inpainting)


@pytest.mark.parametrize("layout", ["pipe=3 patches=5", "ring=3 stale=previous"])
def test_with_all_steps_of_warm_up_it_is_exact(pools, deep, layout):
    asked = loop(WAN, layout, sigmas=SIGMAS[::2])
    asked = replace(asked, layout=replace(asked.layout, warmup=4))
    check(pools, deep, asked, against=ParallelLayout(pipe=2, patches=1))


@pytest.mark.parametrize("layout", ["pipe=3 patches=1", "pipe=2 patches=1 warmup=0"])
def test_one_patch_is_exact(pools, deep, layout):
    check(pools, deep, loop(WAN, layout), against=warmed("pipe=3 patches=5", len(SIGMAS)))


@pytest.mark.parametrize("layout", ["pipe=2 patches=3", "ring=2 stale=previous"])
def test_a_step_from_what_did_not_change_is_exact(pools, deep, layout):
    """The first step stays where it is, so that what the second one keeps of it is what it would compute itself."""
    held = loop(JOINT, layout, sigmas=(1.0, 1.0, 0.4))
    check(pools, deep, held, against=warmed("pipe=2 patches=3", 2))


@pytest.mark.parametrize("layout", ["pipe=2 patches=3", "ring=2 stale=previous"])
def test_inpainting(pools, deep, layout):
    torch.manual_seed(3)
    asked = loop(WAN, layout, sigmas=SIGMAS[::2], batch=1)
    x = asked.tensors()["x"]
    kept = {"mask": (torch.rand(1, 1, *x.shape[2:]) > 0.5).float(), "latent": torch.randn(x.shape)}
    check(pools, deep, asked, inpainting=kept | {"noise": torch.randn(x.shape)})


def test_without_guidance(pools, deep):
    check(pools, deep, loop(JOINT, "pipe=2 patches=3", cfg=1.0))


def test_four_stages_and_guidance_on_eight_ranks(pools, deep):
    check(pools, deep, loop(JOINT, "cfg=2 pipe=4 patches=5", sigmas=SIGMAS[::2], batch=1))


def test_two_hundred_steps(pools, checkpoints):
    message, tensors = requests.sample(requests.spec(checkpoints(heads=3), "pipe=2 patches=3"), Case())
    tensors["sigmas"] = torch.linspace(1, 0, 201)
    answers = pools(2).run(driver.handle, message, tensors)
    assert [answer["error"] for answer in answers] == [None] * 2
    assert torch.isfinite(answers[0]["tensors"]["samples"]).all()


@pytest.mark.parametrize("layout", ["pipe=3 patches=4", "ring=3 stale=previous"])
def test_an_interrupt_drains_within_a_step(pools, deep, layout):
    sigmas = tuple(torch.linspace(1, 0, 41).tolist())
    asked = loop(JOINT, layout, sigmas=sigmas, batch=1)
    _, _, answers = run(pools, deep, asked, cancel_after=6)
    assert {answer["error"] for answer in answers} == {"Cancelled: sampling was cancelled"}
    reports = [progress for progress, _ in answers[0]["reports"]]
    steps_done = [sum(progress.phase == "sampling" for progress in some) for some in (reports[:6], reports)]
    assert steps_done[1] <= steps_done[0] + int(asked.layout.pipe > 1)  # the step that is under way in the stages
    check(pools, deep, loop(JOINT, layout, sigmas=SIGMAS[::4]))  # and the ranks are in step


def test_previews_and_progress(pools, deep):
    asked = loop(WAN, "pipe=2 patches=3", sigmas=SIGMAS[::2])
    path = deep(asked.class_name, asked.variant)
    message = replace(asked.message(path, Devices(kind="cpu", indices=(0, 1))), previews=True)
    answers = pools(2).run(driver.handle, message, asked.tensors())
    shown = [(progress, extra) for progress, extra in answers[0]["reports"] if progress.phase == "sampling"]
    assert [(progress.value, progress.total) for progress, _ in shown] == [(i, 4) for i in range(1, 5)]
    wanted = (1, asked.tensors()["x"].shape[1], 1, *asked.tensors()["x"].shape[3:])
    assert all(extra["preview"].shape == wanted for _, extra in shown)
    # At the last sigma the sampler goes to x0 itself, of which the first sample is shown.
    last = answers[0]["tensors"]["samples"][:1, :, :1]
    assert requests.relative_error(shown[-1][1]["preview"], last) <= CLOSE
