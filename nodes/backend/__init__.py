"""The nodes' access to the backend: connection, devices, GPU memory, checkpoints. Only this package uses the client."""
