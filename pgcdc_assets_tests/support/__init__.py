"""Fixtures and helpers of tests. conftest.py loads the fixtures as plugins."""
