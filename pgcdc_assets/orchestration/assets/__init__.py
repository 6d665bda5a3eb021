"""The assets of a capture."""
