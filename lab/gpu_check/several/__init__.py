"""What two or more GPUs do together: exchanges, overlap, speed against other projects, unlike cards."""
