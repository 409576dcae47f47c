"""How two machines reach each other: addresses, TLS connections, and the files that go with a request."""
