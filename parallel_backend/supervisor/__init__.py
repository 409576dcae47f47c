"""The process that owns the socket, the queue and the ranks. One thread, no torch."""
