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

from ...parallel_backend.checkpoint.checkpoint import Checkpoint
from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.vaes import VAE, LatentScale, vae_of
from .latents import latent_scale


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
    """Text encoders that ComfyUI runs itself, and the name in core's CLIPType that stands for all of them.

    ``components`` are the classes that core knows there, by diffusers' name of the component; those in ``optional``
    may be missing. Without components the model takes no prompt.
    """

    components: Mapping[str, tuple[str, ...]]
    clip_type: str
    optional: frozenset[str] = frozenset()

    def check(self, checkpoint: Checkpoint) -> None:
        """Refuse what core would take for another text encoder: it goes by the weights' names and shapes alone.

        Raises:
            InvalidRequest: names the class and those that work.
        """
        for component, known in self.components.items():
            found = checkpoint.components.get(component)
            if found not in known and not (found is None and component in self.optional):
                raise InvalidRequest(
                    f"{checkpoint.path.name}: {component} is {found or 'missing'}, and this family's CLIP needs "
                    f"{' or '.join(known)} there; load the text encoders with ComfyUI's own nodes instead"
                )


class Bridge(ABC):
    """A checkpoint as ComfyUI sees it. Everything is read from JSON files.

    Attributes:
        native: ComfyUI's own class of the transformer, whose weight names and call it is that the stand-in has.
        text: who encodes its prompts.
        vaes: the classes that the backend can run for it.
    """

    native: ClassVar[type[Any]]
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

    @property
    def vae(self) -> VAE | None:
        """The checkpoint's VAE, if it has one that the backend can run; with any other it is a model without."""
        return vae_of(self.checkpoint) if self.checkpoint.components.get("vae") in self.vaes else None

    def latents(self) -> LatentScale:
        """Of the latents that the checkpoint's VAE gives, if it has one."""
        return latent_scale(self.vae, self.scale(), self.name)

    def check(self) -> None:
        """Refuse what can be seen in the JSON files.

        Raises:
            InvalidRequest: a variant that is not supported.
        """
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
        core = comfy.model_detection.model_config_from_unet_config(unet_config)
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


def unusual(native: type[nn.Module], values: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ``values`` that are not the native transformer's defaults: ComfyUI's detection never looks for them."""
    parameters = inspect.signature(native).parameters
    found = {name: _plain(value) for name, value in values.items()}
    return {name: value for name, value in found.items() if value != _plain(parameters[name].default)}


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


def guidance_of(given: dict[str, Any], *, distilled: bool) -> dict[str, Tensor]:
    """Take guidance ``[B]`` out of a call's arguments; ComfyUI gives it to models that were not distilled with it too.

    Raises:
        InvalidRequest: a node took it away.
    """
    guidance: Tensor | None = given.pop("guidance", None)
    if not distilled:
        return {}
    if guidance is None:
        raise InvalidRequest("this model was distilled with guidance, which it needs: remove FluxDisableGuidance")
    return {"guidance": guidance}


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
