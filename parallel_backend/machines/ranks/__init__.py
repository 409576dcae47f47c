"""What ranks do where a client or other ranks are on other machines: find files, and measure what crosses."""
