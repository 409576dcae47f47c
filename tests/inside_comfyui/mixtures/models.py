"""Random chains of nodes from a loader to a sampler's MODEL, with one of our nodes among them."""

from typing import Any

from mixtures.graph import Graph, Link
from mixtures.source import Source
from natives.loadable import SAMPLING, file_name

AXES = ("data", "cfg", "pipe", "ring", "ulysses", "tensor")
LAYOUTS: tuple[dict[str, Any], ...] = (
    {}, {"ulysses": 2}, {"ring": 2}, {"tensor": 2}, {"cfg": 2}, {"data": 2}, {"pipe": 2, "patches": 1},
    {"ulysses": 2, "shard_weights": True},
)  # fmt: skip
DEVICES = "0,1"
CHANGES = (
    "LoraLoaderModelOnly", "LoraLoaderModelOnly", "LoraLoaderModelOnly", "LoraLoaderBypassModelOnly", "EasyCache",
    "LazyCache", "RescaleCFG", "CFGZeroStar", "CFGNorm", "APG", "FreSca", "TCFG", "Mahiro", "Epsilon Scaling",
    "TemporalScoreRescaling", "ModelNoiseScale", "SkipLayerGuidanceDiT", "SkipLayerGuidanceDiTSimple",
    "SkipLayerGuidanceSD3", "RenormCFG", "DifferentialDiffusion", "ContextWindowsManual", "CFGOverride",
    "VideoLinearCFGGuidance", "UNetSelfAttentionMultiply", "PerpNeg",
)  # fmt: skip
"""Nodes of ComfyUI from MODEL to MODEL."""


def parallel_model(source: Source, graph: Graph) -> Link:
    """Return a MODEL behind Parallel Loader, or behind Parallel Model."""
    family, file = source.name.split()[0], file_name(source.name)
    ours: dict[str, Any] = {"devices": DEVICES}
    if source.chance(0.85):
        layout = source.random.choice(LAYOUTS)
        ours["layout"] = graph.add("ParallelLayout", **dict.fromkeys(AXES, 1) | layout)
    from_file = source.chance(0.5)
    if from_file:
        model = graph.add("ParallelLoader", model_name=f"diffusion_models/{file}", dtype="auto", **ours)
    else:
        model = graph.add("UNETLoader", unet_name=file, weight_dtype="default")
    if SAMPLING[family].needed or source.chance(0.4):
        model = graph.add(SAMPLING[family].node, model=model, **SAMPLING[family].inputs)
    model = _changed_often(source, graph, model)
    if not from_file:
        model = _changed_often(source, graph, graph.add("ParallelModel", model=model, **ours))
    return model


def _changed_often(source: Source, graph: Graph, model: Link) -> Link:
    for _ in range(source.random.choice((0, 0, 0, 1, 1, 2))):
        model = changed(source, graph, model)
    return model


def changed(source: Source, graph: Graph, model: Link) -> Link:
    """Return a MODEL behind one of ComfyUI's nodes; as it is, where this version lacks the node."""
    kind = source.random.choice(CHANGES)
    inputs: dict[str, Any] = {"model": model}
    if kind.startswith("Lora"):
        inputs |= {"lora_name": source.lora(), "strength_model": source.random.choice((0.7, 1.0, -0.4))}
    if kind == "PerpNeg":
        inputs["empty_conditioning"] = source.text(graph)
    return graph.add(kind, **inputs) if kind in graph.kinds else model
