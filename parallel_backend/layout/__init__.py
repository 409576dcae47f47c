"""ParallelLayout, Partition and the nearest layouts that would work: numbers alone, no torch."""
