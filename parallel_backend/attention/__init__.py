"""Attention kernels, key masks, and routing a module's attention call to ours."""
