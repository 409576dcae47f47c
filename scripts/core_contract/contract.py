"""The contract: everything in ComfyUI that this project relies on."""

from scripts.core_contract.entry import Entry
from scripts.core_contract.lists import (
    graph,
    interface,
    model_classes,
    nodes,
    patcher,
    sampling,
    supported_models,
    text_and_vae,
    transformers,
    weights,
)

CONTRACT: tuple[Entry, ...] = (
    *graph.ENTRIES,
    *interface.ENTRIES,
    *sampling.ENTRIES,
    *patcher.ENTRIES,
    *weights.ENTRIES,
    *text_and_vae.ENTRIES,
    *model_classes.ENTRIES,
    *supported_models.ENTRIES,
    *transformers.ENTRIES,
    *nodes.ENTRIES,
)
