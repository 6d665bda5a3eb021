"""Tests of the comparison at one LSN."""
