"""What a single file holds: the architectures of VAEs here, and those of transformers by the families' registry.

Recognition and configs need names and shapes only: no torch, no diffusers, no download.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from ...errors import InvalidRequest
from ...families.architecture import Architecture, Config, Shape, Weights, layer
from ...families.registry import architectures
from ..stored_tensor import StoredTensor
from .other_files import refuse_lora, refuse_other_kinds
from .vae_cogvideox import COGVIDEOX_VAE
from .vae_hunyuan_video import HUNYUAN_VIDEO_VAE
from .vae_images import AUTOENCODER_KL, FLUX2_VAE, FORMER_AUTOENCODER_KL
from .vae_ltx import LTX_VAE
from .vae_minimax_h3 import MINIMAX_H3_VAE
from .vae_mochi import MOCHI_VAE
from .vae_open_sora1 import OPEN_SORA1_VAE
from .vae_wan import WAN_VAE

VAES: tuple[Architecture, ...] = (
    FLUX2_VAE, FORMER_AUTOENCODER_KL, AUTOENCODER_KL, COGVIDEOX_VAE, HUNYUAN_VIDEO_VAE, LTX_VAE, MOCHI_VAE, WAN_VAE,
    OPEN_SORA1_VAE, MINIMAX_H3_VAE,
)  # fmt: skip
"""Architectures of VAEs. AutoencoderKL comes after those that have all of its names and more."""


def find_architecture(class_name: str) -> Architecture | None:
    """Return the architecture of a diffusers class, or None if no single file holds it."""
    return next((each for each in (*architectures(), *VAES) if each.class_name == class_name), None)


def architecture_of(class_name: str) -> Architecture:
    """Return the architecture of a diffusers class that single files hold."""
    found = find_architecture(class_name)
    assert found is not None, class_name
    return found


def in_shape(class_name: str, weights: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return a component's weights in the shapes that its class has, where files lack a dim."""
    found = find_architecture(class_name)
    if found is None:
        return dict(weights)
    return {name: replace(each, shape=found.shape(name, each.shape)) for name, each in weights.items()}


@dataclass(frozen=True, kw_only=True)
class Recognised:
    """What a file's component is.

    Attributes:
        class_name: diffusers' class.
        config: the config of that class.
        native: whether the names are the original ones, which diffusers' converter maps.
        pipeline: the class of diffusers' pipeline, or "".
        left_over: names of layers that the class does not have. ComfyUI leaves them aside, too.
    """

    class_name: str
    config: Config
    native: bool
    pipeline: str
    left_over: frozenset[str] = frozenset()


def recognise(
    shapes: Mapping[str, Shape], metadata: Mapping[str, str], architectures: Iterable[Architecture]
) -> Recognised:
    """Find out which architecture a component's weights have.

    Args:
        shapes: shapes by name, without the file's prefix.
        metadata: the file's metadata.
        architectures: the ones to choose from.

    Raises:
        InvalidRequest: none of them. The message says what the file holds instead, or names the nearest one.
    """
    candidates = tuple(architectures)
    for architecture in candidates:
        published = {architecture.published(name): name for name in shapes}
        plain = {name: name for name in shapes}
        for native, names, marks in ((True, published, architecture.native), (False, plain, architecture.diffusers)):
            if marks and all(mark in names for mark in marks):
                _refuse_foreign(architecture, shapes)
                known = {name: stored for name, stored in names.items() if architecture.knows(name)}
                _refuse_gaps(architecture, known)
                ours = {name: architecture.shape(stored, shapes[stored]) for name, stored in known.items()}
                found = _recognised(architecture, native, ours, metadata)
                return replace(found, left_over=frozenset(shapes).difference(known.values()))
    raise _not_recognised(shapes, candidates)


def _not_recognised(shapes: Mapping[str, Shape], candidates: tuple[Architecture, ...]) -> InvalidRequest:
    """Return the error about weights of no architecture, or raise one that says what they are."""
    refuse_lora(shapes)
    nearest, missing, score = _nearest(shapes, candidates)
    _refuse_foreign(nearest, shapes)
    refuse_other_kinds(shapes)
    near = f"; the nearest is {nearest.class_name}, whose files also have {missing}" if score >= _NEAR else ""
    supported = ", ".join(dict.fromkeys(architecture.class_name for architecture in candidates))
    return InvalidRequest(f"the weights belong to no supported architecture{near}; supported: {supported}")


_NEAR = 0.5
"""The score from which on an architecture is named as the nearest: half a word of its own in each of its names."""

_CONTROLNET = {"controlnet_": "a ControlNet", "input_hint_block.": "a ControlNet"}
"""Parts of names that only ControlNets have, whichever model they belong to."""


def _refuse_foreign(architecture: Architecture, shapes: Mapping[str, Shape]) -> None:
    for part, model in {**architecture.foreign, **_CONTROLNET}.items():
        name = next((name for name in shapes if part in name), None)
        if name is not None:
            raise InvalidRequest(
                f"the file holds {model} (it has {name}), which is not supported: choose another file, or load this "
                "one with ComfyUI's own loader"
            )


def _refuse_gaps(architecture: Architecture, names: Iterable[str]) -> None:
    """Refuse a list of blocks that lacks one: the config would count those before it alone.

    Raises:
        InvalidRequest: names what is there and what is not.
    """
    lists: dict[str, dict[int, str]] = {}
    for name in names:
        if "." in layer(name) and layer(name) in architecture.layers:
            top, number, *_ = name.split(".")
            lists.setdefault(top, {}).setdefault(int(number), name)
    for top, blocks in lists.items():
        missing = next(number for number in range(len(blocks) + 1) if number not in blocks)
        if missing < len(blocks):
            raise InvalidRequest(f"the file has {blocks[max(blocks)]} and lacks {top}.{missing}: download it again")


def _recognised(
    architecture: Architecture, native: bool, shapes: Mapping[str, Shape], metadata: Mapping[str, str]
) -> Recognised:
    try:
        if native and architecture.in_diffusers is not None:
            shapes = {new: shapes[name] for name, new in architecture.in_diffusers(shapes).items()}
        weights = Weights(shapes, architecture.renamed if native else {}, metadata)
        config = architecture.config(weights)
        _refuse_other_settings(architecture, config, weights)
        pipeline = architecture.pipeline(weights)
        return Recognised(class_name=architecture.class_name, config=config, native=native, pipeline=pipeline)
    except InvalidRequest:  # the architecture has a sentence of its own
        raise
    except (LookupError, ValueError, TypeError, ArithmeticError, RecursionError) as error:
        raise InvalidRequest(
            f"the file looks like {architecture.class_name}, but lacks a weight or has one of another shape ({error}): "
            "download it again"
        ) from error


def _refuse_other_settings(architecture: Architecture, config: Config, weights: Weights) -> None:
    """Refuse metadata that gives the transformer another setting than diffusers' class has."""
    described = weights.described("transformer")
    for name, values in architecture.expected(config).items():
        if described.get(name) not in (None, *values):
            raise InvalidRequest(
                f"the file's metadata describes a {architecture.class_name} with {name} {described[name]!r}, which is "
                f"not supported; {' or '.join(map(repr, values))} is: load it with ComfyUI's own loader"
            )


def _nearest(shapes: Mapping[str, Shape], candidates: Iterable[Architecture]) -> tuple[Architecture, str, float]:
    """Return the architecture whose names have most in common with a file's, a name that the file lacks, and a score.

    A word counts the more, the fewer architectures have it.
    """
    marks = [(each, names) for each in candidates for names in (each.native, each.diffusers) if names]
    spread = Counter(word for _, names in marks for word in _words(names))
    have = _words(shapes)
    scores = [sum(1 / spread[word] for word in _words(names) & have) / len(names) for _, names in marks]
    best = max(scores)
    nearest, names = marks[scores.index(best)]
    return nearest, next((name for name in names if name not in shapes), names[0]), best


def _words(names: Iterable[str]) -> set[str]:
    return {word for name in names for word in name.split(".") if not word.isdigit()}


__all__ = ["VAES", "Architecture", "Recognised", "architecture_of", "architectures", "find_architecture", "recognise"]
