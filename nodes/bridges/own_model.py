"""A family that ComfyUI lacks, there: a small model of ours around its schedules, formats and conditioning."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import comfy.conds
import comfy.model_base
import comfy.supported_models_base
import torch
from comfy.ldm.modules.diffusionmodules.util import make_beta_schedule
from comfy.model_sampling import rescale_zero_terminal_snr_sigmas
from safetensors import safe_open
from torch import Tensor

from ...parallel_backend.checkpoint.checkpoint import Checkpoint
from ...parallel_backend.errors import InvalidRequest
from .bridge import Bridge

_BETAS = {"scaled_linear": "linear", "linear": "sqrt_linear"}
"""ComfyUI's name of a schedule by diffusers'."""
_TYPES = {
    "epsilon": comfy.model_base.ModelType.EPS,
    "v_prediction": comfy.model_base.ModelType.V_PREDICTION,
}


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How noisy a timestep is, and what the model predicts: the numbers of a diffusers ``scheduler_config.json``."""

    prediction: comfy.model_base.ModelType
    betas: Mapping[str, Any]
    snr_shift: float
    zero_snr: bool

    @classmethod
    def of(cls, checkpoint: Checkpoint, defaults: Mapping[str, Any]) -> "Schedule":
        """Read a checkpoint's; ``defaults`` are those of its diffusers class.

        Raises:
            InvalidRequest: there is none, or it is of a kind that ComfyUI does not have.
        """
        config = dict(defaults) | checkpoint.config("scheduler")
        kinds: tuple[tuple[str, Mapping[str, Any]], ...] = (("beta_schedule", _BETAS), ("prediction_type", _TYPES))
        for name, known in kinds:
            if config[name] not in known:
                raise InvalidRequest(
                    f"{checkpoint.path.name}: a scheduler with {name} {config[name]!r} is not supported; "
                    f"{', '.join(known)} is"
                )
        return cls(
            prediction=_TYPES[config["prediction_type"]],
            betas={
                "beta_schedule": _BETAS[config["beta_schedule"]],
                "linear_start": config["beta_start"],
                "linear_end": config["beta_end"],
                "timesteps": config["num_train_timesteps"],
            },
            snr_shift=config["snr_shift_scale"],
            zero_snr=bool(config["rescale_betas_zero_snr"]),
        )

    def sigmas(self) -> Tensor:
        """Noise over signal by timestep; where the signal ends at zero, ComfyUI's small number stands for it.

        The signal-to-noise ratio is divided by ``snr_shift`` (diffusers' ``CogVideoXDDIMScheduler``).
        """
        settings = dict(self.betas)
        betas = make_beta_schedule(settings.pop("beta_schedule"), settings.pop("timesteps"), **settings)
        sigmas: Tensor = (self.snr_shift * (1.0 / torch.cumprod(1.0 - betas, dim=0) - 1.0)) ** 0.5
        return rescale_zero_terminal_snr_sigmas(sigmas) if self.zero_snr else sigmas


SCHEDULER: dict[str, Any] = {
    "num_train_timesteps": 1000,
    "beta_start": 0.0001,
    "beta_end": 0.02,
    "beta_schedule": "linear",
    "prediction_type": "epsilon",
    "rescale_betas_zero_snr": False,
    "snr_shift_scale": 1.0,
}
"""What diffusers' ``DDIMScheduler`` takes for a number that its config leaves out."""


class OwnModel(comfy.model_base.BaseModel):  # type: ignore[misc]
    """ComfyUI's model class for a family of ours; what it passes on beside the latent is ``own_conds``."""

    def __init__(self, config: "OwnConfig") -> None:
        super().__init__(config, model_type=config.schedule.prediction)
        self.model_sampling.set_sigmas(config.schedule.sigmas())

    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        """The arguments of a call, by name, as ``BaseModel`` wants them."""
        return self.own_conds(kwargs)

    def own_conds(self, given: dict[str, Any]) -> dict[str, Any]:
        """The prompt, which is never repeated to the length of another: its tokens may be attended with the image's."""
        text = given.get("cross_attn")
        found = {} if text is None else {"c_crossattn": comfy.conds.CONDRegular(text)}
        concat = self.concat_cond(**given)
        return found if concat is None else found | {"c_concat": comfy.conds.CONDNoiseShape(concat)}


class OwnConfig(comfy.supported_models_base.BASE):  # type: ignore[misc]
    """What stands in ``comfy.supported_models`` for the families that are there."""

    unet_extra_config: ClassVar[dict[str, Any]] = {}

    def __init__(self, bridge: "OwnBridge") -> None:
        super().__init__(bridge.unet_config())
        self.bridge, self.latent_format = bridge, bridge.latent_format()
        self.schedule = Schedule.of(bridge.checkpoint, bridge.scheduler)
        self.sampling_settings = {**self.schedule.betas, "zsnr": self.schedule.zero_snr}

    def get_model(self, state_dict: Any, prefix: str = "", device: Any = None) -> OwnModel:
        """The model without weights."""
        return self.bridge.model(self)


class Call(Protocol):
    """How ComfyUI calls a transformer; no family of ours has a class there, so this stands for its signature."""

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor | None = None,
        control: Any = None,
        transformer_options: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """The prediction for ``x`` ``[B, C, ...]``."""


class OwnBridge(Bridge):
    """The bridge of a family that ComfyUI lacks. Weights have diffusers' names.

    Attributes:
        model: the model class.
        scheduler: what diffusers takes for a number that a scheduler's config leaves out.
        factor: what a VAE's latents are multiplied with where no VAE says.
    """

    native = Call
    model: ClassVar[type[OwnModel]] = OwnModel
    scheduler: ClassVar[Mapping[str, Any]] = SCHEDULER
    factor: ClassVar[float]

    @abstractmethod
    def latent_format(self) -> Any:
        """A ``comfy.latent_formats.LatentFormat``."""

    def unet_config(self) -> dict[str, Any]:
        """See ``Bridge``. Nothing is detected: this is what other nodes find in the model's config."""
        return {"image_model": type(self).__name__.lower(), "in_channels": self.config["in_channels"]}

    def core_config(self) -> Any:
        """See ``Bridge``."""
        try:
            config = OwnConfig(self)
        except KeyError as error:
            raise InvalidRequest(f"{self.name}: the transformer's config.json lacks {error}") from error
        config.unet_config["disable_unet_model_creation"] = True
        return config

    def weights(self, unet_config: Mapping[str, Any]) -> dict[str, Tensor]:
        """See ``Bridge``; from the headers of the checkpoint's files."""
        found = {}
        for file in sorted((self.checkpoint.path / "transformer").glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    shape = opened.get_slice(name).get_shape()
                    found[name] = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        return found

    def scaling(self) -> float:
        """What the VAE's latents are multiplied with."""
        config = self.vae.config if self.vae else {}
        return float(config.get("scaling_factor", self.factor))
