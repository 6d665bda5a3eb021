"""Tests of the demonstration: its server, its shop, its run."""
