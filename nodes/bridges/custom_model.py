"""Model classes, in ComfyUI's form, for families that ComfyUI does not have.

They reuse ComfyUI's schedules, latent formats and conditioning.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import comfy.conds
import comfy.model_base
import comfy.patcher_extension
import comfy.supported_models_base
import torch
from comfy.ldm.modules.diffusionmodules.util import make_beta_schedule
from comfy.model_sampling import rescale_zero_terminal_snr_sigmas
from torch import Tensor, nn
from typing_extensions import override

from ...parallel_backend.checkpoint.checkpoint import Checkpoint
from ...parallel_backend.errors import InvalidRequest
from .bridge import Bridge, MetaWeights

_BETA_SCHEDULES = {"scaled_linear": "linear", "linear": "sqrt_linear"}
"""Maps diffusers' ``beta_schedule`` to ComfyUI's name."""
_PREDICTION_TYPES = {
    "epsilon": comfy.model_base.ModelType.EPS,
    "v_prediction": comfy.model_base.ModelType.V_PREDICTION,
}


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A noise schedule and prediction type, as a diffusers ``scheduler_config.json`` describes them.

    Attributes:
        prediction: what the model predicts.
        betas: arguments of ComfyUI's ``make_beta_schedule``, by the names of ``sampling_settings``.
        snr_shift: the divisor of the signal-to-noise ratio.
        zero_snr: whether the terminal signal-to-noise ratio is rescaled to nearly zero.
    """

    prediction: comfy.model_base.ModelType
    betas: Mapping[str, Any]
    snr_shift: float
    zero_snr: bool

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, defaults: Mapping[str, Any]) -> "Schedule":
        """Read a checkpoint's schedule.

        Args:
            defaults: the defaults of its diffusers scheduler class.

        Raises:
            InvalidRequest: the checkpoint has no scheduler, or one of a kind that ComfyUI does not have.
        """
        config = dict(defaults) | checkpoint.config("scheduler")
        choices: tuple[tuple[str, Mapping[str, Any]], ...] = (
            ("beta_schedule", _BETA_SCHEDULES),
            ("prediction_type", _PREDICTION_TYPES),
        )
        for name, supported in choices:
            if config[name] not in supported:
                raise InvalidRequest(
                    f"{checkpoint.name}: a scheduler with {name} {config[name]!r} is not supported; "
                    f"supported: {', '.join(supported)}"
                )
        return cls(
            prediction=_PREDICTION_TYPES[config["prediction_type"]],
            betas={
                "beta_schedule": _BETA_SCHEDULES[config["beta_schedule"]],
                "linear_start": config["beta_start"],
                "linear_end": config["beta_end"],
                "timesteps": config["num_train_timesteps"],
            },
            snr_shift=config["snr_shift_scale"],
            zero_snr=bool(config["rescale_betas_zero_snr"]),
        )

    def settings(self) -> dict[str, Any]:
        """Return ComfyUI's ``sampling_settings``."""
        return {**self.betas, "zsnr": self.zero_snr}

    def sigmas(self) -> Tensor:
        """Return the sigmas, ``[timesteps]``.

        They are ``sqrt(snr_shift * (1 - a) / a)`` with the cumulative product ``a`` of the alphas (the shift is that of
        diffusers' ``CogVideoXDDIMScheduler``). With ``zero_snr``, ComfyUI rescales them so that the terminal SNR is
        nearly zero; exactly zero would make sigma infinite.
        """
        settings = dict(self.betas)
        betas = make_beta_schedule(settings.pop("beta_schedule"), settings.pop("timesteps"), **settings)
        sigmas: Tensor = (self.snr_shift * (1.0 / torch.cumprod(1.0 - betas, dim=0) - 1.0)) ** 0.5
        return rescale_zero_terminal_snr_sigmas(sigmas) if self.zero_snr else sigmas


@dataclass(frozen=True, kw_only=True)
class FlowSchedule:
    """A rectified flow's schedule: ComfyUI's ``FLOW``, where the model predicts noise minus image.

    Attributes:
        shift: of the times, unless a node such as *ModelSamplingSD3* sets another.
        multiplier: what the transformer takes for the time 1.
    """

    shift: float
    multiplier: float
    prediction: ClassVar[comfy.model_base.ModelType] = comfy.model_base.ModelType.FLOW

    def settings(self) -> dict[str, Any]:
        """Return ComfyUI's ``sampling_settings``."""
        return {"shift": self.shift, "multiplier": self.multiplier}

    def sigmas(self) -> None:
        """ComfyUI computes them from the settings."""


DDIM_DEFAULTS: dict[str, Any] = {
    "num_train_timesteps": 1000,
    "beta_start": 0.0001,
    "beta_end": 0.02,
    "beta_schedule": "linear",
    "prediction_type": "epsilon",
    "rescale_betas_zero_snr": False,
    "snr_shift_scale": 1.0,
}
"""Used for entries missing from ``scheduler_config.json``: ``DDIMScheduler``'s defaults, and no SNR shift."""


class CustomModel(comfy.model_base.BaseModel):  # type: ignore[misc]
    """The model class of a family that ComfyUI does not have. Subclasses may override ``transformer_conds``."""

    def __init__(self, config: "CustomConfig") -> None:
        super().__init__(config, model_type=config.schedule.prediction)
        sigmas = config.schedule.sigmas()
        if sigmas is not None:
            self.model_sampling.set_sigmas(sigmas)

    @override
    def extra_conds(self, **kwargs: Any) -> dict[str, Any]:
        return self.transformer_conds(kwargs)

    def transformer_conds(self, conditioning: dict[str, Any]) -> dict[str, Any]:
        """Return the transformer's arguments by name, as ComfyUI's ``conds``.

        The text is a ``CONDRegular``, which ComfyUI does not repeat to match a longer prompt's length. Joint attention
        would attend to the repeated tokens.
        """
        text = conditioning.get("cross_attn")
        conds = {} if text is None else {"c_crossattn": comfy.conds.CONDRegular(text)}
        concat = self.concat_cond(**conditioning)
        return conds if concat is None else conds | {"c_concat": comfy.conds.CONDNoiseShape(concat)}


class CustomConfig(comfy.supported_models_base.BASE):  # type: ignore[misc]
    """The counterpart of an entry of ``comfy.supported_models``."""

    unet_extra_config: ClassVar[dict[str, Any]] = {}  # type: ignore[misc, unused-ignore]

    def __init__(self, bridge: "CustomBridge") -> None:
        super().__init__(bridge.unet_config())
        self.bridge, self.latent_format = bridge, bridge.latent_format()
        self.schedule = bridge.schedule()
        self.sampling_settings = self.schedule.settings()

    @override
    def get_model(self, state_dict: Any, prefix: str = "", device: Any = None) -> CustomModel:
        """Return the model without weights."""
        return self.bridge.model_class(self)


class TransformerSignature:
    """How ComfyUI calls a transformer, for families without a native class."""

    def forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor | None = None,
        control: Any = None,
        transformer_options: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return the prediction for ``x`` ``[B, C, ...]``, through other nodes' wrappers as native classes do it."""
        kind, options = comfy.patcher_extension.WrappersMP.DIFFUSION_MODEL, transformer_options or {}
        wrappers = comfy.patcher_extension.get_all_wrappers(kind, options)
        executor = comfy.patcher_extension.WrapperExecutor.new_class_executor(self._forward, self, wrappers)
        out: Tensor = executor.execute(x, timestep, context, control, options, **kwargs)
        return out

    def _forward(
        self,
        x: Tensor,
        timestep: Tensor,
        context: Tensor | None = None,
        control: Any = None,
        transformer_options: Any = None,
        **kwargs: Any,
    ) -> Tensor:
        raise AssertionError("the stand-in answers this call")


class CustomBridge(Bridge):
    """The bridge of a family that ComfyUI does not have. Weights have the names that the checkpoint gives them.

    Attributes:
        model_class: the class of the model that ComfyUI samples with.
        scheduler_defaults: used for entries missing from ``scheduler_config.json``.
        default_scaling_factor: the latents' scaling factor if the checkpoint's VAE does not give one.
    """

    native_class = TransformerSignature
    model_class: ClassVar[type[CustomModel]] = CustomModel
    scheduler_defaults: ClassVar[Mapping[str, Any]] = DDIM_DEFAULTS
    default_scaling_factor: ClassVar[float]

    @abstractmethod
    def latent_format(self) -> Any:
        """Return a ``comfy.latent_formats.LatentFormat``."""

    def schedule(self) -> Schedule | FlowSchedule:
        """Return the noise schedule. By default it is that of the checkpoint's scheduler."""
        return Schedule.from_checkpoint(self.checkpoint, self.scheduler_defaults)

    def unet_config(self) -> dict[str, Any]:
        """ComfyUI detects nothing here: other nodes read this from the model's config."""
        return {"image_model": type(self).__name__.lower(), "in_channels": self.config["in_channels"]}

    def core_config(self) -> Any:
        try:
            config = CustomConfig(self)
        except KeyError as error:
            raise InvalidRequest(f"{self.name}: the transformer's config lacks {error}") from error
        config.unet_config["disable_unet_model_creation"] = True
        return config

    def module(self, unet_config: Mapping[str, Any]) -> None:
        """There is none."""

    def weights(self, module: nn.Module | None) -> MetaWeights:
        """Shapes come from the headers of the checkpoint's files."""
        stored = self.checkpoint.weights("transformer")
        weights = {
            name: torch.empty(tensor.shape, dtype=torch.bfloat16, device="meta") for name, tensor in stored.items()
        }
        linear = (name for name, tensor in weights.items() if tensor.ndim == 2 and name.endswith(".weight"))
        return MetaWeights(tensors=weights, linear=frozenset(name for name in linear if "embedding_table" not in name))

    def scaling_factor(self) -> float:
        """Return the factor that the VAE's latents are multiplied by."""
        config = self.vae.config if self.vae else {}
        return float(config.get("scaling_factor", self.default_scaling_factor))
