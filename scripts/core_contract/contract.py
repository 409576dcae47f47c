"""The contract: everything in ComfyUI that this project relies on."""

from importlib import import_module
from pkgutil import iter_modules

from scripts.core_contract.entry import Entry
from scripts.core_contract.lists import (
    families,
    graph,
    interface,
    model_classes,
    nodes,
    patcher,
    sampling,
    supported_models,
    text_and_vae,
    weights,
)

_FAMILIES = [import_module(f"{families.__name__}.{module.name}") for module in iter_modules(families.__path__)]

CONTRACT: tuple[Entry, ...] = (
    *graph.ENTRIES,
    *interface.ENTRIES,
    *sampling.ENTRIES,
    *patcher.ENTRIES,
    *weights.ENTRIES,
    *text_and_vae.ENTRIES,
    *model_classes.ENTRIES,
    *supported_models.ENTRIES,
    *(entry for family in _FAMILIES for entry in family.ENTRIES),
    *nodes.ENTRIES,
)
