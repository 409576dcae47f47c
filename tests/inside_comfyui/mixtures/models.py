"""Random chains of nodes from a loader to a sampler's MODEL, with one of our nodes among them."""

from typing import Any

from any_folder_name.parallel_backend.layout.parallel_layout import AXES, ParallelLayout
from helpers.layout_cover import STRATEGIES
from mixtures.graph import Graph, Link
from mixtures.source import Source
from natives.loadable import SAMPLING, file_name

WARM = tuple(map(ParallelLayout.parse, ("pipe=2 warmup=100", "ring=2 stale=previous warmup=100")))
"""Layouts that are approximate only after more steps than a mixture takes."""
LAYOUTS = (*(None, *STRATEGIES) * 2, *WARM)
"""The approximate ones are rarer, since Parallel Sampler refuses them for what the backend's loop lacks."""
DEVICES = "0,1"
CHANGES = (
    "LoraLoaderModelOnly", "LoraLoaderModelOnly", "LoraLoaderModelOnly", "LoraLoaderBypassModelOnly", "EasyCache",
    "LazyCache", "RescaleCFG", "CFGZeroStar", "CFGNorm", "APG", "FreSca", "TCFG", "Mahiro", "Epsilon Scaling",
    "TemporalScoreRescaling", "SkipLayerGuidanceDiT", "SkipLayerGuidanceDiTSimple", "SkipLayerGuidanceSD3",
    "RenormCFG", "DifferentialDiffusion", "ContextWindowsManual", "CFGOverride", "VideoLinearCFGGuidance",
    "UNetSelfAttentionMultiply", "PerpNeg",
)  # fmt: skip
"""Nodes of ComfyUI from MODEL to MODEL."""
ONE_SAMPLE = ("TemporalScoreRescaling", "RenormCFG", "ContextWindowsManual", "VideoLinearCFGGuidance")
"""Those that fail in ComfyUI alone with several samples."""


def parallel_model(source: Source, graph: Graph) -> Link:
    """Return a MODEL behind Parallel Loader, or behind Parallel Model."""
    family, file = source.name.split()[0], file_name(source.name)
    ours: dict[str, Any] = {"devices": DEVICES}
    if (layout := source.random.choice(LAYOUTS)) is not None:
        ours["layout"] = _node_of(layout, graph)
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


def _node_of(layout: ParallelLayout, graph: Graph) -> Link:
    values = {name: getattr(layout, name) for name in (*AXES, "shard_weights", "patches", "warmup")}
    return graph.add("ParallelLayout", **values, stale=layout.stale or "off")


def _changed_often(source: Source, graph: Graph, model: Link) -> Link:
    for _ in range(source.random.choice((0, 0, 0, 1, 1, 2))):
        model = changed(source, graph, model)
    return model


def changed(source: Source, graph: Graph, model: Link) -> Link:
    """Return a MODEL behind one of ComfyUI's nodes; as it is, where this version lacks the node."""
    kind = source.random.choice([kind for kind in CHANGES if source.batch == 1 or kind not in ONE_SAMPLE])
    inputs: dict[str, Any] = {"model": model}
    if kind.startswith("Lora"):
        strength = source.number(graph, source.random.choice((0.7, 1.0, -0.4)))
        inputs |= {"lora_name": source.lora(), "strength_model": strength}
    if kind == "PerpNeg":
        inputs["empty_conditioning"] = source.text(graph)
    return graph.add(kind, **inputs) if kind in graph.kinds else model
