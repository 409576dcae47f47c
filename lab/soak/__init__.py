"""Random prompts and random faults against a live backend, with a ledger."""
