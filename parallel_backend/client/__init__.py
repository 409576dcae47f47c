"""The backend as one blocking call, and commands that the supervisor answers by itself."""
