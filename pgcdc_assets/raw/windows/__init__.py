"""The landed windows of `raw/changes`: their summaries, and their index in `raw/windows`."""
