"""Rows of a comparison that somebody asked for: filtered, sorted, as text."""
