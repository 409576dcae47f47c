"""The persistent backend that holds a sharded diffusion transformer; see ``__main__`` for its commands."""
