"""Sets of ranks: their processes, start and end, output, and failures."""
