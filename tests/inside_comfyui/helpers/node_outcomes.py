"""What a node of ComfyUI does to a parallel MODEL, against what it does in ComfyUI alone."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from any_folder_name.parallel_backend.errors import InvalidRequest
from helpers.inside_fixtures import ksampler, parallel_sampler, parts_of, relative_error
from helpers.node_inputs import UnknownInput, apply
from helpers.scene import Scene
from torch import Tensor

Outcome = Literal["works", "no effect", "refused", "fails"]
"""``works``: the effect is ComfyUI's. ``no effect``: there is none in ComfyUI either. ``refused``: by an error of ours.
``fails``: ComfyUI alone raises an error. Ours raises the same one, or computes what the node asks for."""

CLOSE, FAR = 1e-4, 1e-3
"""The largest difference of equal results, and the smallest effect that a difference cannot hide."""

ROUNDING = ("ModelAttentionBackend",)
"""Nodes that choose how the same is computed."""


class Unlike(AssertionError):
    """A node does something else to a parallel MODEL than in ComfyUI alone."""


def sample(scene: Scene, cfg: float, *, parallel: bool = False) -> Tensor:
    """Return what KSampler, or Parallel Sampler, gives."""
    run = parallel_sampler if parallel else ksampler
    return run(scene.model, scene.latent, positive=scene.positive, negative=scene.negative, cfg=cfg, steps=4)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What ComfyUI alone samples behind a node.

    Attributes:
        result: the latent, or the error.
        effect: the relative difference that the node makes.
    """

    result: Tensor | Exception
    effect: float = 0.0


class Native:
    """A model in ComfyUI alone. Each result is sampled once.

    Args:
        scene: what is sampled without a node.
        cfg: the guidance scale.
    """

    def __init__(self, scene: Scene, cfg: float) -> None:
        self.scene, self.cfg = scene, cfg
        self._references: dict[str, Reference] = {}

    @cached_property
    def plain(self) -> Tensor:
        """The latent without a node."""
        return sample(self.scene, self.cfg)

    def reference(self, node: str, kind: Any) -> Reference:
        """Return what a node does."""
        if node not in self._references:
            self._references[node] = self._sampled(node, kind)
        return self._references[node]

    def _sampled(self, node: str, kind: Any) -> Reference:
        result = _result(node, kind, self.scene, self.cfg, parallel=False)
        if isinstance(result, Exception):
            return Reference(result=result)
        latent = apply(node, kind, self.scene).latent
        same = latent is self.scene.latent
        plain = self.plain if same else sample(replace(self.scene, latent=latent), self.cfg)
        return Reference(result=result, effect=_difference(result, plain))


def outcome(node: str, kind: Any, model: Any, native: Native, *, parallel: bool) -> Outcome:
    """Return what a node does to a parallel MODEL.

    Args:
        node: its id.
        kind: its class.
        model: the parallel MODEL.
        native: the same in ComfyUI alone.
        parallel: whether Parallel Sampler samples ours.

    Raises:
        Unlike: the node is ignored, changes something else, or raises an error that is not ours.
    """
    mine = _result(node, kind, replace(native.scene, model=model), native.cfg, parallel=parallel)
    if isinstance(mine, InvalidRequest):
        return "refused"
    reference = native.reference(node, kind)
    theirs, effect = reference.result, reference.effect
    if isinstance(theirs, Exception):
        if isinstance(mine, Exception) and type(mine) is not type(theirs):
            raise Unlike(f"{node}: ComfyUI alone raises {theirs!r}, and a parallel MODEL {mine!r}")
        return "fails"
    if isinstance(mine, Exception):
        raise Unlike(f"{node}: only a parallel MODEL raises {mine!r}") from mine
    error = _difference(mine, theirs)
    if error > CLOSE:
        raise Unlike(f"{node}: the results differ by {error:.1e}, and its effect is {effect:.1e}")
    if CLOSE / 10 < effect < FAR and node not in ROUNDING:
        raise Unlike(f"{node}: its effect of {effect:.1e} is too small to be told from rounding")
    return "works" if effect >= FAR else "no effect"


def _result(node: str, kind: Any, scene: Scene, cfg: float, *, parallel: bool) -> Tensor | Exception:
    try:
        return sample(apply(node, kind, scene), cfg, parallel=parallel)
    except UnknownInput:
        raise
    except Exception as error:  # whatever ComfyUI raises is compared
        return error


def _difference(one: Any, other: Any) -> float:
    """Return the relative difference of latents; of nested ones, that of the worst tensor."""
    parts, others = parts_of(one), parts_of(other)
    if len(parts) != len(others):
        return float("inf")
    return max(_difference_of(part, each) for part, each in zip(parts, others, strict=True))


def _difference_of(one: Tensor, other: Tensor) -> float:
    """Return the relative difference of finite numbers; infinite where only one is finite, or shapes differ."""
    if one.shape != other.shape or not torch.equal(one.isfinite(), other.isfinite()):
        return float("inf")
    finite = one.isfinite()
    return relative_error(one[finite], other[finite]) if finite.any() else 0.0


def model_nodes(mappings: Mapping[str, Any]) -> dict[str, Any]:
    """Return ComfyUI's own nodes, without those of extensions, that take and give a MODEL or a CONDITIONING."""
    return {name: kind for name, kind in mappings.items() if _is_core(kind) and _changes(kind)}


def _is_core(kind: Any) -> bool:
    module = kind.__module__
    return module == "nodes" or Path(module).parent.name == "comfy_extras"


def _changes(kind: Any) -> bool:
    declared = kind.INPUT_TYPES()
    types = [each[0] for group in ("required", "optional") for each in declared.get(group, {}).values()]
    return any(name in types and name in kind.RETURN_TYPES for name in ("MODEL", "CONDITIONING"))
