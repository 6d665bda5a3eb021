"""The asset checks of a capture."""
