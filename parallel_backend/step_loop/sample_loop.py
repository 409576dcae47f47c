"""The step loop of layouts without pipeline stages."""

from collections.abc import Callable

from torch import Tensor

from ..distributed import rank_speeds
from ..distributed.collectives import agree
from ..errors import Cancelled
from ..samplers.interface import ModelCall
from .cached_calls import CachedCalls, Shards
from .sampling_context import Report, SamplingContext
from .schedule import ViewSchedule, call_kinds


class SampleLoop:
    """One ``Sample`` request on this rank. All ranks of a data group hold the same latent after each step."""

    def __init__(self, setting: SamplingContext, *, report: Report, cancelled: Callable[[], bool]) -> None:
        self.setting, self.report, self.cancelled = setting, report, cancelled
        self.denoiser = setting.denoiser
        kinds = call_kinds(self.denoiser.plan.layout.stale, setting.calls()[1])
        self.views = ViewSchedule(self.denoiser.full_view, kinds)
        cache = setting.message.cache
        self.cached = CachedCalls(cache, setting, self._predict) if cache else None

    def run(self) -> dict[str, Tensor]:
        """Run all steps.

        Returns:
            ``samples``, and with a cache ``FORECASTS``, on rank 0, an empty dict on other ranks.

        Raises:
            Cancelled: on all ranks, before the next denoiser call.
        """
        setting = self.setting
        x = setting.run(self.denoise, self._on_step)
        self.views.finish()
        gathered = setting.gather(x)
        return {**gathered, **self.cached.counts()} if self.cached and gathered else gathered

    def denoise(self, x: Tensor, sigma: Tensor) -> Tensor:
        """The guided x0 of ``x`` at ``sigma``."""
        self._check_cancelled()
        if self.cached:
            return self.cached.x0(x, sigma)
        out = self._predict(x, sigma, None)
        assert out is not None
        return self.setting.x0(x, sigma, out)

    def _predict(self, x: Tensor, sigma: Tensor, shards_unless: Shards | None) -> Tensor | None:
        """The guided prediction for ``x`` at ``sigma``; None if ``shards_unless`` says that it is to be forecast.

        Each rank applies guidance to its tokens before they are gathered. Gathering both branches first would send
        twice as much.
        """
        setting = self.setting
        inputs = setting.inputs(setting.inpainting.model_input(x, sigma), sigma)
        view = self.views.next()
        shards = shards_unless(inputs) if shards_unless else self.denoiser.shards(inputs, view)
        if shards is None:
            return None
        guided = setting.guided(self.denoiser.comparable(shards))
        return self.denoiser.latent(guided)

    def _on_step(self, index: int, denoised: Tensor, following: ModelCall | None) -> None:
        setting = self.setting
        kept = setting.kept(following) if setting.message.keep and following else {}
        setting.report_step(index, denoised, kept, self.report)

    def _check_cancelled(self) -> None:
        rank_speeds.synchronize(
            self.setting.x.device
        )  # otherwise the host queues steps ahead and a cancel takes effect late
        whole = self.denoiser.mesh.all_ranks
        if agree(int(whole.index == 0 and self.cancelled()), whole):
            self.views.finish()
            raise Cancelled("sampling was cancelled")
