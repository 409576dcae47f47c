"""python -m parallel_backend doctor: what of this machine and this installation is fine, slow or broken."""
