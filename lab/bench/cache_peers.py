"""Step caches beside cache-dit's: ``python -m lab bench cache-peers``.

All run the same diffusers pipeline of the shipped checkpoint in one process, in turns: the same prompts, noise and
steps. For each setting of a peer, one of ours should be at least as fast and its pictures as close to the exact ones.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lab.verify.loops.quality import GUIDANCE, SHAPES, SHIFT, Pictures, decoded, psnr
from parallel_backend.errors import InvalidRequest
from parallel_backend.step_cache.history import StepHistory
from parallel_backend.step_cache.schedule import Moment
from parallel_backend.step_cache.settings import PRESETS, StepCache, preset

from .results import print_results

STEPS = (24, 50)
PROMPTS, BATCH = 32, 8
SIZE = 128
INTERVALS, ORDERS = (2, 3, 4, 5), (1, 2)
"""Of our settings beside the presets."""
COMPUTED = (0.4, 0.5, 0.75)
"""Parts of the steps, the last ones, that our settings for small gains compute."""
THRESHOLDS = (0.04, 0.08, 0.16, 0.32)
"""Of DBCache: 0.08 is its default, and 0.32 skips almost all that may be skipped."""
WARMUP = 4
"""Of DBCache: of 24 steps, its default of 8 leaves too few to skip."""
MASKS = ("medium", "fast", "ultra")
"""cache-dit's fixed schedules."""
SPEED, CLOSENESS = 0.02, 0.25
"""The part of the speed, and the dB, by which settings count as equal: times vary by as much."""
TRIFLE = 1.05
"""A setting that gains less is not compared: nobody would use it."""

Prepare = Callable[[Any, int], AbstractContextManager[None]]
"""Switches a cache on for a pipeline and a number of steps."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("--prompts", type=int, default=PROMPTS, help=f"a multiple of {BATCH} (default %(default)s)")
    parser.add_argument(
        "--steps", type=int, action="append", metavar="N", help="of each loop; repeatable (default 24 and 50)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Compare what caches gain and lose."""
    steps = options.steps or STEPS
    if options.prompts < BATCH or options.prompts % BATCH or options.prompts > PROMPTS:
        raise InvalidRequest(f"--prompts {options.prompts}: a multiple of {BATCH} up to {PROMPTS} works")
    if any(preset(mode, number) is None for mode in PRESETS for number in steps):
        raise InvalidRequest(f"--steps {min(steps)}: all of them are computed; from 12 on a cache saves some")
    rows = (row for number in steps for row in compare(number, options.prompts))
    return print_results(rows, as_json=options.json)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A cache with its settings.

    Attributes:
        name: as shown.
        ours: whether it is this project's.
        prepare: switches it on.
    """

    name: str
    ours: bool
    prepare: Prepare


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a setting gains and loses.

    Attributes:
        steps: of each loop.
        speedup: over all steps computed, the median over the batches.
        psnr: of the pictures to the exact ones, the mean over the prompts, in dB.
        matched: the name of a setting of ours that is at least as fast and as close, "" if there is none or this is
            one of ours.
    """

    name: str
    ours: bool
    steps: int
    speedup: float
    psnr: float
    matched: str = ""

    @property
    def failed(self) -> bool:
        """Whether a peer's setting is better than all of ours."""
        return not self.ours and self.speedup >= TRIFLE and not self.matched

    def describe(self) -> str:
        """Format the outcome as text."""
        line = f"{self.steps} steps, {self.name}: {self.speedup:.2f}x, {self.psnr:.1f} dB"
        if self.ours or self.speedup < TRIFLE:
            return f"         {line}"
        return f"passed   {line}; {self.matched} is as good" if self.matched else f"FAILED   {line}; none of ours is"


def settings(steps: int) -> list[Setting]:
    """Return what is compared for a number of steps: ours first."""
    caches = {mode: cache for mode in PRESETS if (cache := preset(mode, steps))}
    caches |= {
        f"interval {interval} order {order}": StepCache(interval=interval, order=order)
        for interval in INTERVALS
        for order in ORDERS
    }
    caches |= {
        f"interval 2 order {order} before the last {part:.0%}": StepCache(interval=2, order=order, final=final)
        for part, final in ((part, int(part * steps)) for part in COMPUTED)
        for order in ORDERS
    }
    caches["interval 2 order 1 warm-up 2 before the last 85%"] = StepCache(
        interval=2, order=1, warmup=2, final=int(0.85 * steps)
    )
    found = [Setting(name=name, ours=True, prepare=partial(_ours, cache)) for name, cache in caches.items()]
    for forecast, added in {"": None, " + TaylorSeer": 1}.items():
        found += [
            Setting(
                name=f"DBCache {threshold:g}{forecast}",
                ours=False,
                prepare=partial(_cache_dit, {"max_warmup_steps": WARMUP, "residual_diff_threshold": threshold}, added),
            )
            for threshold in THRESHOLDS
        ]
        found += [
            Setting(name=f"mask {mask}{forecast}", ours=False, prepare=partial(_masked, mask, added)) for mask in MASKS
        ]
    return found


def compare(steps: int, prompts: int) -> list[Outcome]:
    """Run all settings in turns, and say of each of a peer's whether one of ours is as good."""
    found = settings(steps)
    pictures = _Pictures(steps, prompts)
    seconds: dict[str, list[float]] = {each.name: [] for each in found}
    closeness: dict[str, list[float]] = {each.name: [] for each in found}
    for batch in range(prompts // BATCH):
        exact, alone = pictures.timed(batch, nullcontext())
        for each in found:
            made, taken = pictures.timed(batch, each.prepare(pictures.pipeline, steps))
            seconds[each.name].append(alone / taken)
            closeness[each.name] += [psnr(one, other) for one, other in zip(exact, made, strict=True)]
    outcomes = [
        Outcome(
            name=each.name, ours=each.ours, steps=steps,
            speedup=statistics.median(seconds[each.name]), psnr=statistics.fmean(closeness[each.name]),
        )
        for each in found
    ]  # fmt: skip
    return [_judged(each, outcomes) for each in outcomes]


def _judged(outcome: Outcome, outcomes: Sequence[Outcome]) -> Outcome:
    """Name the fastest of ours that is as close, if it is as fast."""
    as_good = [
        each
        for each in outcomes
        if each.ours and each.psnr >= outcome.psnr - CLOSENESS and each.speedup >= outcome.speedup * (1 - SPEED)
    ]
    if outcome.ours or not as_good:
        return outcome
    values = vars(outcome) | {"matched": max(as_good, key=lambda each: each.speedup).name}
    return Outcome(**values)


class _Pictures:
    """Makes pictures of held-out prompts by diffusers' own pipeline."""

    def __init__(self, steps: int, prompts: int) -> None:
        from training import sampling
        from training.scenes import Scene, held_out

        self.steps, self.pipeline = steps, sampling.load(SHAPES, shift=SHIFT)
        found = held_out()
        triples = found[:: len(found) // prompts][:prompts]
        captions = [Scene(shape=s, colour=c, background=b).caption for s, c, b in triples]
        with torch.no_grad():
            self.texts = self.pipeline.encode_prompt(captions, "", max_sequence_length=512)

    @torch.no_grad()
    def timed(self, batch: int, cache: AbstractContextManager[None]) -> tuple[Pictures, float]:
        """Return a batch's pictures ``[N, H, W, 3]`` and the seconds of its loop."""
        part = slice(batch * BATCH, (batch + 1) * BATCH)
        positive, negative = (text[part] for text in self.texts)
        with cache:
            start = time.perf_counter()
            latents = self.pipeline(
                prompt_embeds=positive, negative_prompt_embeds=negative, height=SIZE, width=SIZE, num_frames=1,
                num_inference_steps=self.steps, guidance_scale=GUIDANCE, output_type="latent",
                generator=torch.Generator().manual_seed(batch),
            ).frames  # fmt: skip
            taken = time.perf_counter() - start
        return decoded(self.pipeline, latents), taken


@contextmanager
def _ours(cache: StepCache, pipeline: Any, steps: int) -> Iterator[None]:
    """Forecast calls of a pipeline's transformer, which it calls for the prompt and then for the negative one."""
    transformer = pipeline.transformer
    compute, history = transformer.forward, StepHistory[int](cache)
    calls, made = 0, dict[int, Any]()

    def forward(**inputs: Any) -> tuple[Tensor]:
        nonlocal calls, made
        step, branch = divmod(calls, 2)
        calls += 1
        moment = Moment(position=float(step), steps=steps)
        if branch == 0:
            made = history.forecast(moment) if history.skips(moment) else {}
        if branch not in made:
            made[branch] = compute(**inputs)[0]
            if branch == 1:
                history.add(moment, made)
        return (made[branch],)

    transformer.forward = forward
    try:
        yield
    finally:
        del transformer.forward


@contextmanager
def _cache_dit(values: Mapping[str, Any], order: int | None, pipeline: Any, steps: int) -> Iterator[None]:
    """Switch DBCache on, with forecasts of TaylorSeer's of this order if there is one."""
    try:
        import cache_dit
    except ImportError as error:
        raise InvalidRequest("cache-dit is missing: run pip install -r requirements-bench.txt") from error
    config = cache_dit.DBCacheConfig(
        Fn_compute_blocks=1, Bn_compute_blocks=0, num_inference_steps=steps, enable_separate_cfg=True, **values
    )
    forecast = None if order is None else cache_dit.TaylorSeerCalibratorConfig(taylorseer_order=order)
    cache_dit.enable_cache(pipeline, cache_config=config, calibrator_config=forecast)
    try:
        yield
    finally:
        cache_dit.disable_cache(pipeline)


def _masked(mask: str, order: int | None, pipeline: Any, steps: int) -> AbstractContextManager[None]:
    """Switch one of cache-dit's fixed schedules on."""
    import cache_dit

    computed = cache_dit.steps_mask(mask_policy=mask, total_steps=steps)
    values = {"steps_computation_mask": computed, "steps_computation_policy": "static"}
    return _cache_dit(values, order, pipeline, steps)
