"""The nodes' access to the backend: connection, devices, GPU memory and checkpoints. Only this package uses the client."""
