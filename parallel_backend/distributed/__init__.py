"""What ranks share: mesh, collectives, relative speeds, stop flags, what was sent and held."""
