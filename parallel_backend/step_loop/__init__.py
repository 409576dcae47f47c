"""A Sample request's whole step loop on the ranks: exact, displaced patch, PipeFusion."""
