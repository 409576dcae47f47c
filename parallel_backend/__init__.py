"""The persistent backend that runs a diffusion transformer on several ranks; ``__main__`` has its commands."""
