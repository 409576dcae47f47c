"""One denoiser call of every family, layout and checkpoint, against diffusers' own forward."""
