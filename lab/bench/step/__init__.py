"""One denoiser step, timed against one process and against other projects."""
