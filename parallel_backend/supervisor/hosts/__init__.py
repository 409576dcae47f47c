"""Further hosts: the connection to each one's agent, and the processes of ranks that it runs."""
