"""Attention kernels, key masks, and routing of modules' attention calls."""
