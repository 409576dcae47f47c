"""The nodes' access to the backend: connection, GPU memory and checkpoints. Only this package uses the client."""
