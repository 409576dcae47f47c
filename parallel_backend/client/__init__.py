"""Client of the backend: blocking requests to the ranks, and commands that the supervisor answers itself."""
