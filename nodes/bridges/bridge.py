"""A family's bridge between ComfyUI and the backend."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import comfy.model_detection
import comfy.model_patcher
import comfy.ops
import torch
from torch import Tensor, nn

from ...parallel_backend.checkpoint.checkpoint import Checkpoint
from ...parallel_backend.errors import InvalidRequest
from ...parallel_backend.vaes import VAE, LatentScale, vae_of
from .latents import SAME_MODEL, latent_scale
from .refusals import check_finite, check_latent, check_number_of_latents


@dataclass(frozen=True, kw_only=True)
class BackendText:
    """A text encoder that the ranks run.

    Attributes:
        key: ComfyUI's name of the encoder in tokenized prompts.
        length: the number of tokens that shorter prompts are padded to.
        encoder: the encoder's class.
        masked: whether the encoder masks the padding, whose embeddings are then zero.
    """

    key: str
    length: int
    encoder: str
    masked: bool = True


@dataclass(frozen=True, kw_only=True)
class CoreText:
    """Text encoders that ComfyUI runs itself.

    Attributes:
        components: the classes that ComfyUI supports, by diffusers' component name. Empty if the model takes no prompt.
        clip_type: the member of ComfyUI's ``CLIPType`` that stands for all of them.
        optional: components that may be missing.
    """

    components: Mapping[str, tuple[str, ...]]
    clip_type: str
    optional: frozenset[str] = frozenset()

    def check(self, checkpoint: Checkpoint) -> None:
        """Refuse a text encoder that ComfyUI would mistake for another: it detects only by weight names and shapes.

        Raises:
            InvalidRequest: a text encoder has another class, or its weights cannot be used. The message names it.
        """
        for component, supported in self.components.items():
            class_name = checkpoint.components.get(component)
            if not supported:
                raise InvalidRequest(
                    f"{checkpoint.name}: ComfyUI's text encoder of this family needs weights of the model's single "
                    "file: load the text encoders with ComfyUI's own nodes instead"
                )
            if class_name not in supported and not (class_name is None and component in self.optional):
                raise InvalidRequest(
                    f"{checkpoint.name}: {component} is {class_name or 'missing'}, and this family's CLIP needs "
                    f"{' or '.join(supported)}; load the text encoders with ComfyUI's own nodes instead"
                )
        for component in self.components:
            if component in checkpoint.components:
                checkpoint.stored(component)  # refuses what cannot be read


@dataclass(frozen=True, kw_only=True)
class MetaWeights:
    """A transformer's weights on the meta device.

    Attributes:
        tensors: by ComfyUI's names.
        linear: names of the weights of linear layers.
        unpatched: names of the weights that ComfyUI leaves as they are when it loads a model with changes. Only hooks
            change them.
        here: names of the weights of layers that run in this process (``LayersHere``).
    """

    tensors: Mapping[str, Tensor]
    linear: frozenset[str]
    unpatched: frozenset[str] = frozenset()
    here: frozenset[str] = frozenset()


class LayersHere(ABC):
    """Layers of a transformer that run in ComfyUI's process. One of ``Bridge.attributes``."""

    @abstractmethod
    def attach(
        self,
        changed: Callable[[], Mapping[str, Sequence[Any]]],
        decoded: Callable[[Sequence[str]], Mapping[str, Tensor]],
    ) -> None:
        """Connect the layers with a model.

        Args:
            changed: returns what nodes change in the layers' weights now, by their names.
            decoded: returns weights by their names, as the ranks decode them.
        """


class Bridge(ABC):
    """A checkpoint as ComfyUI sees it, read from its configs, or from a file's header.

    Attributes:
        native_class: ComfyUI's transformer class, whose weight names and call signature the stand-in has.
        text: how its prompts are encoded.
        vaes: the VAE classes that the backend can run for it.
        latents: names of the inputs that are predicted (``Family.latents``).
        latents_maker: ComfyUI's node that makes a latent of so many tensors, if they are several.
        masks_in_loop: whether the backend's loop keeps what a noise mask says as ComfyUI's model class does.
    """

    native_class: ClassVar[type[Any]]
    text: BackendText | CoreText
    vaes: ClassVar[tuple[str, ...]]
    latents: ClassVar[tuple[str, ...]] = ("hidden_states",)
    latents_maker: ClassVar[str] = ""
    masks_in_loop: ClassVar[bool] = True

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint, self.name = checkpoint, checkpoint.name
        self.config: Mapping[str, Any] = checkpoint.config("transformer")

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> "Bridge":
        """Return the bridge of a checkpoint. A family with several bridges chooses one here."""
        return cls(checkpoint)

    @property
    def supported_conds(self) -> frozenset[str]:
        """The entries of ``refusals.UNSUPPORTED_CONDS`` that this model does take."""
        return frozenset()

    @abstractmethod
    def unet_config(self) -> dict[str, Any]:
        """Return what ComfyUI's model detection would find in the converted weights."""

    @abstractmethod
    def inputs(self, x: Any, timestep: Any, call_args: dict[str, Any]) -> dict[str, Tensor]:
        """Return the backend's inputs for one of ComfyUI's calls to its transformer.

        Args:
            x: the latent, with concatenated channels where the model takes them. A list for a model of several.
            timestep: ``[B]``, or what ComfyUI's model class of the family makes of it.
            call_args: the call's other arguments that are not None. What the backend's inputs carry is removed.

        Returns:
            Tensors by the backend's names, batch first. A batch of 1 stands for all samples.

        Raises:
            InvalidRequest: an argument is missing, or its value is not supported.
        """

    def check_latents(self, latents: Sequence[Tensor]) -> None:
        """Refuse what the model cannot denoise.

        Args:
            latents: the tensors of a nested latent, or the only one.

        Raises:
            InvalidRequest: their number, the picture's channels or a value does not fit.
        """
        check_number_of_latents(len(latents), len(self.latents), self.name, self.latents_maker)
        check_latent(latents[0], self.family_latent_scale().channels)
        for other in latents[1:]:
            check_finite(other)

    def option_inputs(self, transformer_options: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return inputs that follow from ComfyUI's ``transformer_options`` in a call."""
        return {}

    def loop_inputs(self, model: Any) -> dict[str, Tensor]:
        """Return inputs that a branch needs in the backend's loop alone.

        They stand for what ComfyUI's transformer does to the latent around the part that other nodes may wrap.
        """
        return {}

    @abstractmethod
    def family_latent_scale(self) -> LatentScale:
        """Return the family's latent channels, and how many pixels and frames one latent position covers."""

    @property
    def vae(self) -> VAE | None:
        """The checkpoint's VAE; None if it has no VAE, or the backend cannot run it."""
        return vae_of(self.checkpoint) if self.checkpoint.components.get("vae") in self.vaes else None

    def latent_scale(self) -> LatentScale:
        """Return the scale of the latents of the checkpoint's VAE, or the family's scale without one."""
        return latent_scale(self.vae, self.family_latent_scale(), self.name)

    def check(self) -> None:
        """Refuse what the configs show to be unsupported.

        Raises:
            InvalidRequest: a variant that is not supported.
        """
        self.core_config()
        if self.latent_scale().channels != self.family_latent_scale().channels:
            raise InvalidRequest(
                f"{self.name}: the VAE has {self.latent_scale().channels} latent channels, and the transformer works "
                f"on {self.family_latent_scale().channels}; {SAME_MODEL}"
            )

    def core_config(self) -> Any:
        """Return ComfyUI's ``supported_models`` entry for the checkpoint, which creates its model class weightless.

        Raises:
            InvalidRequest: this ComfyUI has no such entry, or the config lacks a number.
        """
        try:
            unet_config = self.unet_config()
        except KeyError as error:
            raise InvalidRequest(f"{self.name}: the transformer's config lacks {error}") from error
        core_config = comfy.model_detection.model_config_from_unet_config(unet_config)
        if core_config is None:
            raise InvalidRequest(
                f"{self.name}: this version of ComfyUI has no model for {self.checkpoint.components['transformer']} "
                "with this config; a newer version may have one"
            )
        core_config.unet_config["disable_unet_model_creation"] = True
        return core_config

    def values_for_dtype(self) -> dict[str, Any]:
        """Return the entries of ``unet_config`` that follow from weights' values. ComfyUI chooses a dtype by them."""
        return {}

    @property
    def replaceable_blocks(self) -> Mapping[str, int]:
        """How many blocks of each kind ComfyUI's transformer lets a node replace, in the order of the model."""
        return {}

    def module(self, unet_config: Mapping[str, Any]) -> nn.Module | None:
        """Return ComfyUI's own transformer on the meta device, or None if ComfyUI does not have the family."""
        return meta_module(self.native_class, unet_config)

    def weights(self, module: nn.Module | None) -> "MetaWeights":
        """Return the transformer's weights under ComfyUI's names, on the meta device."""
        assert module is not None
        linear = (name for name, each in module.named_modules() if isinstance(each, nn.Linear))
        tensors = dict(module.state_dict())
        patched = patched_weights(SimpleNamespace(model=module, patches={}))
        return MetaWeights(
            tensors=tensors,
            linear=frozenset(f"{name}.weight" for name in linear),
            unpatched=frozenset(tensors) - patched,
        )

    def attributes(self) -> dict[str, Any]:
        """Return what ComfyUI reads from its transformer besides layers and plain values."""
        return {}


def patched_weights(patcher: Any) -> frozenset[str]:
    """Return the names of the weights that ComfyUI changes as nodes say when it loads a MODEL.

    It leaves out weights of modules that contain other modules, such as the modulation of Wan's blocks.
    """
    loaded = comfy.model_patcher.ModelPatcher._load_list(patcher)
    return frozenset(f"{module}.{name}" if module else name for *_, module, _, names in loaded for name in names)


def non_default(native_class: type[nn.Module], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``values`` that differ from the native transformer's defaults.

    ComfyUI's model detection does not infer them. A parameter that this ComfyUI's class lacks counts as different.
    """
    defaults = {name: parameter.default for name, parameter in inspect.signature(native_class).parameters.items()}
    plain = {name: _as_list(value) for name, value in values.items()}
    return {name: value for name, value in plain.items() if value != _as_list(defaults.get(name))}


def pop_text(call_args: dict[str, Any]) -> Tensor:
    """Remove the prompt's embedding ``[B, L, D]`` from a call's arguments and return it.

    Raises:
        InvalidRequest: there is none.
    """
    context: Tensor | None = call_args.pop("context", None)
    if context is None:
        raise InvalidRequest("the conditioning has no text; encode the prompt with the CLIP of Parallel Loader")
    return context


def pop_pooled_text(call_args: dict[str, Any]) -> Tensor:
    """Remove the prompt's pooled embedding ``[B, D]`` from a call's arguments and return it.

    Raises:
        InvalidRequest: there is none.
    """
    pooled: Tensor | None = call_args.pop("y", None)
    if pooled is None:
        raise InvalidRequest("the conditioning has no pooled output: encode the prompt with the CLIP of this family")
    return pooled


def pop_guidance(call_args: dict[str, Any], *, distilled: bool) -> dict[str, Tensor]:
    """Remove the guidance ``[B]`` from a call's arguments and return it as the backend's input.

    ComfyUI also passes it to models without guidance distillation, which do not use it: they get ``{}``.

    Raises:
        InvalidRequest: a guidance-distilled model gets none, because a node removed it.
    """
    guidance: Tensor | None = call_args.pop("guidance", None)
    if not distilled:
        return {}
    if guidance is None:
        raise InvalidRequest("this model is guidance-distilled and needs guidance: remove FluxDisableGuidance")
    return {"guidance": guidance}


def split_channels(x: Tensor, channels: int) -> dict[str, Tensor]:
    """Split ``x`` into the latent ``[B, channels, ...]`` and, if there are more channels, ComfyUI's ``concat``."""
    latent, concat = x[:, :channels], x[:, channels:]
    return {"hidden_states": latent, **({"concat": concat} if concat.shape[1] else {})}


class _WithWeights(comfy.ops.disable_weight_init):  # type: ignore[misc]
    """Layers that have their weights from the start.

    Under dynamic VRAM, which is ComfyUI's default with an NVIDIA GPU, its own layers get them when a file is loaded.
    Layers that load by other means are exempt from that.
    """

    class Linear(comfy.ops.disable_weight_init.Linear):  # type: ignore[misc]
        _load_from_state_dict = nn.Module._load_from_state_dict

    class Embedding(comfy.ops.disable_weight_init.Embedding):  # type: ignore[misc]
        _load_from_state_dict = nn.Module._load_from_state_dict


_LOADED_OTHERWISE: tuple[type[nn.Module], ...] = (_WithWeights.Linear, _WithWeights.Embedding)


def meta_module(native_class: type[nn.Module], unet_config: Mapping[str, Any]) -> nn.Module:
    """Return a native transformer on the meta device."""
    options = {name: value for name, value in unet_config.items() if name != "disable_unet_model_creation"}
    module = native_class(**options, device="meta", dtype=torch.bfloat16, operations=_WithWeights)
    plain = {kind: getattr(comfy.ops.disable_weight_init, kind.__name__) for kind in _LOADED_OTHERWISE}
    for layer in module.modules():
        if type(layer) in plain:
            layer.__class__ = plain[type(layer)]  # other extensions may look for exactly these
    return module


def _as_list(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
