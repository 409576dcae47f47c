"""``python -m parallel_backend certificates``: a private authority, and what it signs for servers and clients."""
