"""``ParallelLayout``, ``Partition`` and suggestions for layouts that do not fit. Numbers only, no torch."""
