"""A whole step loop on the ranks: guidance, inpainting, progress, cancelling."""

from collections.abc import Callable

from torch import Tensor

from ..distributed import rank_speeds
from ..distributed.collectives import agree
from ..errors import Cancelled
from ..samplers.samplers import SAMPLERS, drive
from .schedule import ViewSchedule, call_kinds
from .setting import Report, Setting


class SampleLoop:
    """One ``Sample`` on this rank: its samples, for which all ranks of the group keep the same latent."""

    def __init__(self, setting: Setting, *, report: Report, cancelled: Callable[[], bool]) -> None:
        self.setting, self.report, self.cancelled = setting, report, cancelled
        self.denoiser = setting.denoiser
        calls = call_kinds(self.denoiser.plan.layout.stale, setting.calls()[1])
        self.views = ViewSchedule(self.denoiser.everything, calls)

    def run(self) -> dict[str, Tensor]:
        """Run all steps.

        Returns:
            ``samples`` on rank 0, nothing on other ranks.

        Raises:
            Cancelled: on all ranks alike, before the next denoiser call.
        """
        setting = self.setting
        sampler = SAMPLERS[setting.message.sampler]
        x = drive(sampler, self.denoise, setting.x, setting.sigmas, self._on_step)
        self.views.finish()
        return setting.gather(x)

    def denoise(self, x: Tensor, sigma: Tensor) -> Tensor:
        """The guided x0 at ``sigma``.

        Guidance is applied to each rank's tokens before they are gathered, which sends half of what gathering
        both branches would.
        """
        self._check_cancelled()
        setting = self.setting
        own = self.denoiser.shards(setting.inputs(setting.noise.given(x, sigma), sigma), self.views.next())
        guided = setting.guided(self.denoiser.comparable(own))
        return setting.noise.x0(x, sigma, self.denoiser.latent(guided))

    def _on_step(self, index: int, denoised: Tensor) -> None:
        self.setting.tell(index, denoised, self.report)

    def _check_cancelled(self) -> None:
        rank_speeds.wait(self.setting.x.device)  # else the host runs steps ahead, and a cancel comes late
        whole = self.denoiser.mesh.whole
        if agree(int(whole.index == 0 and self.cancelled()), whole):
            self.views.finish()
            raise Cancelled("sampling was cancelled")
