"""The sensors of a capture, and their decisions."""
