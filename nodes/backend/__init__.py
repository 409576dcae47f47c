"""The backend as nodes see it: connection, memory, checkpoints. The only way to the client."""
