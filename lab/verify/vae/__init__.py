"""VAEs split over ranks, compared with diffusers' own decode and encode."""
