"""The process through which other machines reach a backend: it ends TLS, and lets only those in that it knows."""
