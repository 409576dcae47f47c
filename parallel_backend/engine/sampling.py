"""The denoiser's part of a request for a whole step loop."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial

from torch import Tensor

from ..denoiser.denoiser import Denoiser
from ..progress import PROGRESS
from ..protocol.messages import Progress, Sample
from ..step_loop.pipefusion import PipeFusion
from ..step_loop.sample_loop import SampleLoop
from ..step_loop.sampling_context import SamplingContext
from .denoising import Denoising
from .request import Tensors, measured
from .validation import check_sample


class Sampling(Denoising):
    """A ``Sample`` request on this rank."""

    def sample(self) -> Tensors:
        """Run a ``Sample``: the last latent on rank 0, an empty dict on other ranks."""
        message, metas = self.request.message, self.request.metas
        assert isinstance(message, Sample)
        self._prepare(check_sample(message, metas, self.components.checkpoint, self.agreements.world.size))
        if self._arranged is None:
            return {}
        denoiser = self._arranged.denoiser
        setting = SamplingContext(denoiser, message, self._share(self._arranged))
        if message.measure:
            setting.load()
        loop_class = PipeFusion if denoiser.plan.layout.pipe > 1 else SampleLoop
        with (
            self._computing("sampling"),
            measured(message, denoiser.mesh.all_ranks, self.components.device) as measurement,
        ):
            PROGRESS.step(message.first_step, len(setting.sigmas) - 1)
            with self._noted_loop(denoiser) as step_done:
                report = partial(self._report, denoiser, step_done)
                loop = loop_class(setting, report=report, cancelled=self.request.cancelled)
                results = {name: tensor.cpu() for name, tensor in loop.run().items()}
        return results | (measurement.of_all_ranks() if measurement else {})

    def _noted_loop(self, denoiser: Denoiser) -> AbstractContextManager[Callable[[], str]]:
        if self.elsewhere is None:
            return nullcontext(str)  # which returns ""
        return self.elsewhere.loop(denoiser.plan.layout, chosen=self.request.message.model.layout is None)

    def _report(
        self, denoiser: Denoiser, step_done: Callable[[], str], progress: Progress, extra: Mapping[str, Tensor]
    ) -> None:
        """Report progress, streaming of blocks, ranks with less than a share, and notes about other machines."""
        notes = (self.components.transformers.note, denoiser.plan.split.note, step_done())
        self.request.report(replace(progress, note="; ".join(filter(None, notes))), extra)
