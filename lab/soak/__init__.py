"""python -m parallel_backend soak: random prompts and random faults against a live backend, with a ledger."""
