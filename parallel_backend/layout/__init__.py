"""``ParallelLayout``, ``Split`` of work over its ranks, and layouts that would work. Numbers only, no torch."""
