"""Everything that only a backend of several machines needs. With one machine, nothing here is imported."""
