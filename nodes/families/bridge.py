"""What a family's bridge between ComfyUI and the backend gives."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import comfy.model_detection
import comfy.ops
import torch
from torch import Tensor, nn

from ...parallel_backend.checkpoint import Checkpoint
from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.vaes import LatentScale
from ..latents import latent_scale


@dataclass(frozen=True, kw_only=True)
class BackendText:
    """A text encoder that the ranks run.

    ``key`` is ComfyUI's name of it, ``length`` what shorter prompts are padded to, ``encoder`` its class. ``masked``
    says whether the encoder leaves the padding out, whose embeddings are then zero.
    """

    key: str
    length: int
    encoder: str
    masked: bool = True


@dataclass(frozen=True, kw_only=True)
class CoreText:
    """Text encoders that ComfyUI runs itself: diffusers' names of the components, and a name in core's CLIPType.

    Without components the model takes no prompt.
    """

    components: tuple[str, ...]
    clip_type: str


class Bridge(ABC):
    """A checkpoint as ComfyUI sees it. Everything is read from JSON files.

    Attributes:
        native: ComfyUI's own class of the transformer, whose weight names and call it is that the stand-in has.
        vaes: the classes that the backend can run for it.
    """

    native: ClassVar[type[nn.Module]]
    text: BackendText | CoreText
    vaes: ClassVar[tuple[str, ...]]

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint, self.name = checkpoint, checkpoint.path.name
        self.config: Mapping[str, Any] = checkpoint.config("transformer")

    @property
    def conds(self) -> frozenset[str]:
        """Conditioning beside the prompt that this model takes, of ``guards.UNSUPPORTED_CONDS``."""
        return frozenset()

    @abstractmethod
    def unet_config(self) -> dict[str, Any]:
        """What ComfyUI's model detection would find in the converted weights."""

    @abstractmethod
    def inputs(self, x: Tensor, timestep: Tensor, given: dict[str, Any]) -> dict[str, Tensor]:
        """The backend's inputs for a call of ComfyUI's to its transformer, batch first, or 1 for all samples.

        Takes out of ``given``, the call's other arguments that are not None, what it carries over.

        Raises:
            InvalidRequest: something is missing, or is there and cannot be carried over.
        """

    @abstractmethod
    def scale(self) -> LatentScale:
        """Of the latents that the family works on."""

    def latents(self) -> LatentScale:
        """Of the latents that the checkpoint's VAE gives, if it has one."""
        return latent_scale(self.checkpoint, self.scale())

    def check(self) -> None:
        """Refuse what can be seen in the JSON files.

        Raises:
            InvalidRequest: a component or a variant that is not supported.
        """
        encoders = (self.text.encoder,) if isinstance(self.text, BackendText) else None
        for component, known in (("vae", self.vaes), ("text_encoder", encoders)):
            found = self.checkpoint.components.get(component)
            if found is not None and known is not None and found not in known:
                raise InvalidRequest(f"{self.name}: {component} {found} is not supported; it is {', '.join(known)}")
        self.core_config()
        if self.latents().channels != self.scale().channels:
            raise InvalidRequest(
                f"{self.name}: the VAE has {self.latents().channels} latent channels, and the transformer works on "
                f"{self.scale().channels}"
            )

    def core_config(self) -> Any:
        """ComfyUI's ``supported_models`` entry for the checkpoint, which makes its model class without weights.

        Raises:
            InvalidRequest: this ComfyUI has none, or a config lacks a number.
        """
        try:
            unet_config = self.unet_config()
        except KeyError as error:
            raise InvalidRequest(f"{self.name}: the transformer's config.json lacks {error}") from error
        known = takes(self.native, unet_config)
        core = comfy.model_detection.model_config_from_unet_config(unet_config) if known else None
        if core is None:
            raise InvalidRequest(
                f"{self.name}: this version of ComfyUI has no model for {self.checkpoint.components['transformer']} "
                "with such a config; a newer one may"
            )
        core.unet_config["disable_unet_model_creation"] = True
        return core

    def weights(self, unet_config: Mapping[str, Any]) -> dict[str, Tensor]:
        """Names and shapes of the transformer's weights as ComfyUI knows them, on the meta device."""
        return meta_weights(self.native, unet_config)

    def attributes(self, weights: Mapping[str, Tensor]) -> dict[str, Any]:
        """What else ComfyUI reads from its transformer; ``weights`` are its own, on the meta device."""
        return {}


def takes(native: type[nn.Module], unet_config: Mapping[str, Any]) -> bool:
    """Whether this version's transformer has all arguments; a family's older relative may be there without it."""
    parameters = inspect.signature(native).parameters
    anything = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return anything or unet_config.keys() <= parameters.keys()


def unusual(native: type[nn.Module], values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``values`` that are not the native transformer's defaults: ComfyUI's detection never looks for them."""
    parameters = inspect.signature(native).parameters
    usual = {name: _plain(parameters[name].default) for name in values if name in parameters}
    found = {name: _plain(value) for name, value in values.items()}
    return {name: value for name, value in found.items() if name not in usual or usual[name] != value}


def text_of(given: dict[str, Any]) -> Tensor:
    """Take the prompt's embedding ``[B, L, D]`` out of a call's arguments.

    Raises:
        InvalidRequest: there is none.
    """
    context: Tensor | None = given.pop("context", None)
    if context is None:
        raise InvalidRequest("the conditioning has no text; encode the prompt with the CLIP of ParallelLoader")
    return context


def pooled_of(given: dict[str, Any]) -> Tensor:
    """Take the prompt's pooled embedding ``[B, D]`` out of a call's arguments.

    Raises:
        InvalidRequest: there is none.
    """
    pooled: Tensor | None = given.pop("y", None)
    if pooled is None:
        raise InvalidRequest("the conditioning has no pooled output: encode the prompt with the CLIP of this family")
    return pooled


def split_channels(x: Tensor, channels: int) -> dict[str, Tensor]:
    """The latent ``[B, channels, ...]`` and, if there is more, what ComfyUI put beside it as ``concat``."""
    latent, concat = x[:, :channels], x[:, channels:]
    return {"hidden_states": latent, **({"concat": concat} if concat.shape[1] else {})}


def layer(weights: Mapping[str, Tensor], name: str) -> SimpleNamespace:
    """A stand-in for a layer that ComfyUI only asks for the shape of its weight."""
    return SimpleNamespace(weight=weights[f"{name}.weight"])


def meta_weights(native: type[nn.Module], unet_config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Names and shapes of a native transformer's weights, on the meta device."""
    shape = {name: value for name, value in unet_config.items() if name != "disable_unet_model_creation"}
    made = native(**shape, device="meta", dtype=torch.bfloat16, operations=comfy.ops.disable_weight_init)
    return dict(made.state_dict())


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
