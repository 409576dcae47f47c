"""The processes that benchmarks run on, and the cases that they run."""
