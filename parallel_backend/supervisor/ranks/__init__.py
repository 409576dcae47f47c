"""Sets of ranks: their processes, how they start and end, what they write, and why they fail."""
