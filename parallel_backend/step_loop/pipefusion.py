"""PipeFusion (https://arxiv.org/abs/2405.14430): the step loop of layouts with pipeline stages.

Each stage holds a range of the blocks. The first calls run on the whole latent. After them, patches of the latent
stream through the stages one after another: each stage caches the keys and values of all tokens, and renews them for
the patch that it runs (see ``strategies.patch_attention``). The last stage runs the sampler on its patch and sends the
result to the first stage, so no stage waits for a step to end. All shapes are known in advance: only activations,
patches and, once a call, rank 0's stop flag are sent.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ..denoiser.denoiser import alike
from ..denoiser.stage_boundary import IncomingStreams
from ..distributed.stop_flags import StopFlags
from ..errors import Cancelled
from ..interfaces import patch_plan
from ..interfaces.geometry import common_tokens
from ..layout.partition import Partition
from ..progress import PROGRESS
from .latent_relay import FirstStage, LastStage, PatchIndices
from .sampling_context import Report, SamplingContext
from .stage import Group, Stage, Task


class PipeFusion:
    """One ``Sample`` request on this rank."""

    def __init__(self, setting: SamplingContext, *, report: Report, cancelled: Callable[[], bool]) -> None:
        self.setting, self.report = setting, report
        self.mesh, self.plan, self.boundary = setting.denoiser.mesh, setting.denoiser.plan, setting.denoiser.boundary
        extents = self.plan.extents
        self.image = patch_plan.image_patches(extents, patch_plan.patch_count(self.plan.layout, extents))
        self.tokens = self.image
        if len(predicted := setting.denoiser.predicted) > 1:  # all in a single patch
            lengths = common_tokens(extents) or [extents[0].streams[name] for name in predicted]
            self.tokens = Partition((sum(lengths),))
        self.stage = Stage(setting, self.image)
        self.calls, self.whole = setting.calls()
        self._predicted: dict[int, Tensor] = {}
        self.groups: list[Group] = []
        self.first: FirstStage | None = None
        self.last: LastStage | None = None
        if len(setting.x):
            inputs = setting.inputs(setting.x, setting.sigmas[0])
            self.groups = [tuple(group) for group in alike(inputs, self.plan.variants)]
            self._make_ends()
        # Made after the weights are loaded: a refused request then leaves no flag in flight.
        self.flags = StopFlags(self.mesh.all_ranks, setting.x.device, cancelled)

    def run(self) -> dict[str, Tensor]:
        """Run all steps.

        Returns:
            ``samples`` on rank 0, an empty dict on other ranks.

        Raises:
            Cancelled: on all ranks, after the current step, or one step later if that one was almost done.
        """
        try:
            self._run_tasks()
            for end in (self.first, self.last, self.boundary, self.flags):
                if end:
                    end.finish()
            if self.flags.stopped:
                raise Cancelled("sampling was cancelled")
            return self.setting.gather(self.first.x if self.first else self.setting.x)
        finally:
            # It refers back to this object. Without the cycle, keys and values are freed now instead of by gc.
            self.first = None

    def _run_tasks(self) -> None:
        tasks = self._tasks()
        task = next(tasks, None)
        incoming = self._expect(task)
        while task:
            self.stage.family(task)  # all stages load weights at the same time
            if incoming is None:  # the first stage: it learns on its way whether another call follows
                self._run(task, {})
                task = next(tasks, None)
                continue
            streams = incoming.wait()
            following = next(tasks, None)
            incoming = self._expect(following)  # received while this task computes
            self._run(task, streams)
            task = following

    def _make_ends(self) -> None:
        setting, boundaries = self.setting, self.mesh.pipe_links
        assert boundaries is not None
        return_axis = boundaries[-1]
        extent = self.plan.extents[0]
        family = setting.denoiser.experts.at(setting.time(self.calls[0].sigma))
        patches = PatchIndices.of(family, self.tokens, extent.values, self.plan.sizes())
        preview = setting.message.previews and return_axis.ranks[0] == 0
        if self.boundary.first:
            sigmas = [call.sigma for call in self.calls]
            self.first = FirstStage(setting, patches, sigmas, return_axis, self._on_call, preview=preview)
        if self.boundary.last:
            self.last = LastStage(setting, patches, return_axis, preview=preview)
            self._tokens = setting.x.new_zeros(len(setting.x), self.tokens.total, extent.values)

    def _tasks(self) -> Iterator[Task]:
        """This stage's tasks, in order. They end early if rank 0 was told to cancel."""
        patches = tuple(range(len(self.image.sizes)))
        for index, call in enumerate(self.calls):
            if not self.flags.should_continue():
                return
            if call.step is not None:
                PROGRESS.step(call.step, len(self.setting.sigmas) - 1)
            whole, streams_next = self.whole[index], not all(self.whole[index + 1 : index + 2])
            for unit in [patches] if whole else [(patch,) for patch in patches]:
                for group in self.groups:
                    ends_unit = group is self.groups[-1]
                    yield Task(
                        index=index, call=call, unit=unit, group=group, ends_unit=ends_unit,
                        ends_call=ends_unit and unit[-1] == patches[-1],
                        caches=len(patches) > 1 and (not whole or streams_next),
                    )  # fmt: skip

    def _expect(self, task: Task | None) -> IncomingStreams | None:
        if task is None or self.boundary.first:
            return None
        family = self.setting.denoiser.experts.current
        return self.boundary.expect(self.stage.shapes(task), torch.empty(0, dtype=family.dtype, device=family.device))

    def _run(self, task: Task, streams: dict[str, Tensor]) -> None:
        if self.first:
            self.first.wait_until(task.index - 1, task.unit[-1])
        state = self.stage.run(task, streams, self.first.x if self.first else self.setting.x)
        if task.ends_call and task.index + 1 < len(self.calls):
            self.flags.send_next()
        if not self.boundary.last:
            self.boundary.send(state.streams)
        else:
            split = self.stage.split(task.group[0], task.unit)
            tokens = self.stage.family(task).head(split.shard_whole(state))
            self._predicted.update(zip(task.group, tokens.split(len(self.setting.x)), strict=True))
        if task.ends_unit and self.first:
            self.first.expect(task.index, task.unit, begins_step=task.call.step is not None)
        if task.ends_unit and self.last:
            self.last.step(task.unit, self._guided(task))

    def _on_call(self, index: int, preview: Tensor) -> None:
        """Report a step whose last call has ended. Only the last stage has a sampler's history, so none is kept."""
        following = self.calls[index + 1] if index + 1 < len(self.calls) else None
        if following and following.step is None:
            return
        kept: dict[str, Tensor] = {}
        # A data group without samples does not come here, so the others cannot gather.
        whole_batch = self.plan.samples[0] >= self.mesh.layout.data
        if following and self.first and self.setting.message.keep and whole_batch:
            kept = self.setting.kept(replace(following, x=self.first.noised.clone(), history=()))
        self.setting.report_step(self._step_of(index), preview, kept, self.report)

    def _step_of(self, index: int) -> int:
        """Return the step to which a call belongs."""
        return next(call.step for call in reversed(self.calls[: index + 1]) if call.step is not None)

    def _guided(self, task: Task) -> Tensor:
        """The guided prediction ``[B, C, ...]``. Only the patches of the task's unit are new."""
        start = self.tokens.offsets[task.unit[0]]
        end = start + sum(self.tokens.sizes[patch] for patch in task.unit)
        local = [self._predicted[i] for i in sorted(self._predicted)]
        splits = [self.stage.split(i, task.unit) for i in sorted(self._predicted)]
        streams, common = self.setting.denoiser.predicted, common_tokens(self.plan.extents)
        if common is None:
            tokens = splits[0].unshard(self.setting.guided(torch.stack(local)), streams)[:, : end - start]
        else:
            gathered = [split.unshard(tokens, streams) for split, tokens in zip(splits, local, strict=True)]
            if len(streams) > 1:
                branches = zip(sorted(self._predicted), gathered, strict=True)
                gathered = [self.setting.denoiser.first_tokens(i, tokens, common) for i, tokens in branches]
            tokens = self.setting.guided(torch.stack([tokens[:, : end - start] for tokens in gathered]))
        self._tokens[:, start:end] = tokens
        return self.stage.family(task).prediction(self._tokens, self.plan.sizes())
