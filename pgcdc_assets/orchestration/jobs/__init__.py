"""The jobs of a capture, and the functions behind the commands."""
