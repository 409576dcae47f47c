"""The contract: everything of ComfyUI that this project relies on."""

from scripts.core_contract.entry import Entry
from scripts.core_contract.lists import interface, models, nodes, patcher, sampling, text_and_vae, transformers

CONTRACT: tuple[Entry, ...] = (
    *interface.ENTRIES,
    *sampling.ENTRIES,
    *patcher.ENTRIES,
    *text_and_vae.ENTRIES,
    *models.ENTRIES,
    *transformers.ENTRIES,
    *nodes.ENTRIES,
)
