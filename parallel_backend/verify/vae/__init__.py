"""A VAE split over ranks, against diffusers' own decode and encode."""
