"""``python -m parallel_backend certificates``: a private authority, and its certificates for servers and clients."""
