"""What a rank does with a request: check it, load what is missing, and forward, sample, decode, encode. No sockets."""
