"""The process that owns the socket, the request queue and the rank processes. One thread, no torch."""
