"""PipeFusion (https://arxiv.org/abs/2405.14430): the step loop of a layout with stages.

Each stage holds a range of the blocks. After some steps on the whole latent its patches stream through the stages one
after the other; each stage keeps the keys and values of its layers for the whole row and renews those of the patch
(see ``strategies.patches``). The last stage takes the sampler's step with its patch and hands it to the first, so that
no stage waits for the end of a step. All sizes are known beforehand: nothing but activations, patches and, once a
call, a flag of rank 0 is sent.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..denoiser.denoiser import alike
from ..denoiser.stage_boundary import IncomingStreams
from ..distributed.stop_flags import StopFlags
from ..errors import Cancelled
from ..interfaces import patch_plan
from ..interfaces.geometry import IMAGE, common
from ..samplers.samplers import SAMPLERS
from .latent_relay import FirstStage, LastStage, PatchElements
from .setting import Report, Setting
from .stage import Group, Stage, Task


class PipeFusion:
    """One ``Sample`` on this rank."""

    def __init__(self, setting: Setting, *, report: Report, cancelled: Callable[[], bool]) -> None:
        self.setting, self.report = setting, report
        self.mesh, self.plan, self.boundary = setting.denoiser.mesh, setting.denoiser.plan, setting.denoiser.boundary
        self.image = patch_plan.cut(self.plan.extents, patch_plan.count(self.plan.layout, self.plan.extents))
        self.work = Stage(setting, self.image)
        self.asks, self.whole = setting.calls()
        self._predicted: dict[int, Tensor] = {}
        self.groups: list[Group] = []
        self.front: FirstStage | None = None
        self.rear: LastStage | None = None
        if len(setting.x):
            inputs = setting.inputs(setting.x, setting.sigmas[0])
            self.groups = [tuple(group) for group in alike(inputs)]
            self._make_ends()
        # After the weights are loaded: what is refused then leaves no flag on its way.
        self.flags = StopFlags(self.mesh.whole, setting.x.device, cancelled)

    def run(self) -> dict[str, Tensor]:
        """Run all steps.

        Returns:
            ``samples`` on rank 0, nothing on other ranks.

        Raises:
            Cancelled: on all ranks alike, after the step that is under way, or the next where that was nearly done.
        """
        try:
            self._run_tasks()
            for end in (self.front, self.rear, self.boundary, self.flags):
                if end:
                    end.finish()
            if self.flags.stopped:
                raise Cancelled("sampling was cancelled")
            return self.setting.gather(self.front.x if self.front else self.setting.x)
        finally:
            self.front = None  # which knows this object: both would go, with all keys and values, when gc runs at last

    def _run_tasks(self) -> None:
        tasks = self._tasks()
        task = next(tasks, None)
        arriving = self._expect(task)
        while task:
            self.work.family(task)  # where it is to be loaded, all stages do it at once
            if arriving is None:  # on the first stage, which says on its way whether another call follows
                self._do(task, {})
                task = next(tasks, None)
                continue
            streams = arriving.wait()
            following = next(tasks, None)
            arriving = self._expect(following)  # it travels while this one computes
            self._do(task, streams)
            task = following

    def _make_ends(self) -> None:
        setting, boundaries = self.setting, self.mesh.boundaries
        assert boundaries is not None
        back = boundaries[-1]
        extent, size = self.plan.extents[0], self.plan.latents[0][2:]
        family = setting.denoiser.experts.at(setting.time(setting.sigmas[0]))
        elements = PatchElements.of(family, self.image, extent.values, size)
        preview = setting.message.previews and back.ranks[0] == 0
        if self.boundary.first:
            self.front = FirstStage(setting, elements, back, self._on_step, preview=preview)
        if self.boundary.last:
            sampler = SAMPLERS[setting.message.sampler]
            self.rear = LastStage(setting, sampler, elements, back, preview=preview)
            self._tokens = setting.x.new_zeros(len(setting.x), self.image.total, extent.values)

    def _tasks(self) -> Iterator[Task]:
        """What this stage does, in order. It ends early where rank 0 was told to cancel."""
        every = tuple(range(len(self.image.sizes)))
        for call, ask in enumerate(self.asks):
            if not self.flags.go_on():
                return
            whole, streams_next = self.whole[call], not all(self.whole[call + 1 : call + 2])
            for unit in [every] if whole else [(patch,) for patch in every]:
                for group in self.groups:
                    ends = group is self.groups[-1]
                    yield Task(
                        call=call, ask=ask, unit=unit, group=group, ends=ends, last=ends and unit[-1] == every[-1],
                        keeps=len(every) > 1 and (not whole or streams_next),
                    )  # fmt: skip

    def _expect(self, task: Task | None) -> IncomingStreams | None:
        if task is None or self.boundary.first:
            return None
        family = self.setting.denoiser.experts.current
        return self.boundary.expect(self.work.shapes(task), torch.empty(0, dtype=family.dtype, device=family.device))

    def _do(self, task: Task, streams: dict[str, Tensor]) -> None:
        if self.front:
            self.front.arrive(task.call - 1, task.unit[-1])
        state = self.work.run(task, streams, self.front.x if self.front else self.setting.x)
        if task.last and task.call + 1 < len(self.asks):
            self.flags.tell()
        if not self.boundary.last:
            self.boundary.send(state.streams)
        else:
            tokens = self.work.family(task).head(state)
            self._predicted.update(zip(task.group, tokens.split(len(self.setting.x)), strict=True))
        if task.ends and self.front:
            self.front.expect(task.call, task.ask.step, task.unit)
        if task.ends and self.rear:
            self.rear.step(task.unit, self._guided(task))

    def _on_step(self, step: int, shown: Tensor) -> None:
        self.setting.tell(step, shown, self.report)

    def _guided(self, task: Task) -> Tensor:
        """The guided prediction ``[B, C, ...]``, of which the unit's patches are new."""
        start, own = self.image.offsets[task.unit[0]], [self._predicted[i] for i in sorted(self._predicted)]
        end = start + sum(self.image.sizes[patch] for patch in task.unit)
        parts = [self.work.split(i, task.unit) for i in sorted(self._predicted)]
        if common(self.plan.extents) is None:
            tokens = parts[0].unshard(self.setting.guided(torch.stack(own)), IMAGE)[:, : end - start]
        else:
            whole = [part.unshard(tokens, IMAGE)[:, : end - start] for part, tokens in zip(parts, own, strict=True)]
            tokens = self.setting.guided(torch.stack(whole))
        self._tokens[:, start:end] = tokens
        return self.work.family(task).unpatchify(self._tokens, self.plan.latents[0][2:])
