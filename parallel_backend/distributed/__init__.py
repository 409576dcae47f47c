"""What the ranks share: mesh, collectives, relative speeds, stop flags, and counters of traffic and memory."""
