"""Random transactions, killed captures, and their expected result."""
