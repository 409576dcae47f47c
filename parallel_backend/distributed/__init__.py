"""What the ranks share: the device mesh, collectives, relative speeds, stop flags, and traffic and memory counters."""
