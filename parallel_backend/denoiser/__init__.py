"""One denoiser call on one mesh: this rank's tokens, what attention sees, and how results are put together."""
