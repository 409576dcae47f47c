"""One denoiser call on one mesh: this rank's rows and tokens, what attention sees, how results come together."""
