"""The process through which other machines reach a backend: it ends TLS, and lets only known clients in."""
