"""The jobs of a capture, and what the command line runs of them."""
