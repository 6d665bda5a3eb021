"""Random transactions, killed captures, and what must be true in the end."""
