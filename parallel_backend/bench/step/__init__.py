"""A denoiser step, against one process and other projects."""
