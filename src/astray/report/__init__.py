"""A Comparison → text, CSV, JSON."""
