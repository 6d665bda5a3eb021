"""The sensors of a capture, and what they decide."""
