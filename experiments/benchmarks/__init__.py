"""Measurements of speed: each prints a table, none is asserted as a time in tests."""
