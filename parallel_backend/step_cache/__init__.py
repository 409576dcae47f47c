"""Step caches: which model calls of a sampling are forecast from the calls before, and how. Approximate."""
