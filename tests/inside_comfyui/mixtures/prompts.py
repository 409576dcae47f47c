"""Random conditioning: texts, areas, masks, ranges of steps, and LoRAs by hooks."""

from typing import Any

from mixtures.graph import Graph, Link
from mixtures.source import Source

RANGES = ((0.0, 0.5), (0.5, 1.0), (0.2, 0.8), (0.0, 1.0))
TWEAKS = (
    "ConditioningSetAreaStrength", "ConditioningSetTimestepRange", "FluxGuidance", "ConditioningMultiply",
    "ConditioningAverage", "ConditioningSetProperties", "ConditioningSetProperties",
)  # fmt: skip
IMAGE_AREAS = ("ConditioningSetArea", "ConditioningSetAreaPercentage")
VIDEO_AREAS = ("ConditioningSetAreaPercentageVideo",)
MASKS = ("ConditioningSetMask",)
JOINS = ("ConditioningConcat",)


def conditioning(source: Source, graph: Graph, *, parts: int) -> Link:
    """Return a conditioning of some prompts."""
    combined = _part(source, graph)
    for _ in range(parts - 1):
        if source.chance(0.2):
            default = _part(source, graph)
            combined = graph.add("ConditioningSetDefaultCombine", cond=combined, cond_DEFAULT=default)
        else:
            part = _part(source, graph)
            combined = graph.add("ConditioningCombine", conditioning_1=combined, conditioning_2=part)
    return combined


def _part(source: Source, graph: Graph) -> Link:
    part = source.text(graph)
    for _ in range(source.random.choice((0, 0, 1, 1, 2))):
        part = _changed(source, graph, part)
    return part


def _changed(source: Source, graph: Graph, part: Link) -> Link:
    """Return a prompt behind one of ComfyUI's nodes; as it is, where this version lacks the node."""
    kind, number = source.random.choice(_tweaks(source)), source.random
    inputs: dict[str, Any] = {"conditioning": part}
    if kind == "ConditioningSetArea":
        inputs |= {"width": number.choice((16, 24, 40)), "height": number.choice((16, 32))}
        inputs |= {"x": number.choice((0, 8)), "y": number.choice((0, 8, 16))}
        inputs |= {"strength": source.number(graph, number.choice((0.5, 1.0)))}
    elif kind.startswith("ConditioningSetAreaPercentage"):
        inputs |= {"x": number.choice((0.0, 0.4)), "y": number.choice((0.0, 0.3)), "strength": 1.0}
    elif kind == "ConditioningSetAreaStrength":
        inputs |= {"strength": number.choice((0.0, 0.4, 1.5))}
    elif kind == "ConditioningSetMask":
        inputs |= {"mask": source.mask(graph), "strength": number.choice((0.6, 1.0)), "set_cond_area": _area(source)}
    elif kind == "ConditioningSetTimestepRange":
        inputs |= dict(zip(("start", "end"), number.choice(RANGES), strict=True))
    elif kind in ("ConditioningConcat", "ConditioningAverage"):
        inputs = {"conditioning_to": part, "conditioning_from": source.text(graph)}
    elif kind == "ConditioningSetProperties":
        inputs = {"cond_NEW": part, "set_cond_area": _area(source), **_properties(source, graph)}
    return graph.add(kind, **inputs) if kind in graph.kinds else part


def _tweaks(source: Source) -> tuple[str, ...]:
    """Return the nodes that ComfyUI alone can run with a model."""
    areas = VIDEO_AREAS if source.video else IMAGE_AREAS
    possible = ((areas, source.areas), (MASKS, source.masks), (JOINS, source.joins))
    return (*TWEAKS, *(kind for kinds, fit in possible if fit for kind in kinds))


def _area(source: Source) -> str:
    """Return how a mask limits what is computed. ComfyUI knows bounds in images alone."""
    return "mask bounds" if source.chance(0.3) and not source.video else "default"


def _properties(source: Source, graph: Graph) -> dict[str, Any]:
    found: dict[str, Any] = {"strength": source.random.choice((1.0, 0.7))}
    if source.chance(0.8):
        found["hooks"] = _hooks(source, graph)
    if source.masks and source.chance(0.3):
        found["mask"] = source.mask(graph)
    if source.chance(0.3):
        start, end = source.random.choice(RANGES)
        found["timesteps"] = graph.add("ConditioningTimestepsRange", start_percent=start, end_percent=end)
    return found


def _hooks(source: Source, graph: Graph) -> Link:
    hooks = _hook(source, graph)
    if source.chance(0.3):
        hooks = graph.add("CombineHooks2", hooks_A=hooks, hooks_B=_hook(source, graph))
    return hooks


def _hook(source: Source, graph: Graph) -> Link:
    strength = source.random.choice((0.4, 0.9, -0.5))  # no tensor: ComfyUI multiplies it in place, once a layer
    hook = graph.add("CreateHookLoraModelOnly", lora_name=source.lora(), strength_model=strength)
    if source.chance(0.6):
        hook = graph.add("SetHookKeyframes", hooks=hook, hook_kf=_keyframes(source, graph))
    return hook


def _keyframes(source: Source, graph: Graph) -> Link:
    number, kind = source.random, source.random.choice(("Keyframe", "KeyframesInterpolated", "KeyframesFromFloats"))
    if kind == "KeyframesInterpolated":
        return graph.add(
            f"CreateHook{kind}", strength_start=number.choice((0.0, 0.2)), strength_end=1.0, end_percent=0.9,
            interpolation=number.choice(("linear", "ease_in", "ease_out", "ease_in_out")), keyframes_count=4,
        )  # fmt: skip
    if kind == "KeyframesFromFloats":
        return graph.add(f"CreateHook{kind}", floats_strength=source.given(graph, [0.2, 0.9, 0.5]))
    first = graph.add(f"CreateHook{kind}", strength_mult=1.0, start_percent=0.0)
    later = {"strength_mult": number.choice((0.0, 0.5)), "start_percent": number.choice((0.3, 0.6))}
    return graph.add(f"CreateHook{kind}", prev_hook_kf=first, **later)
