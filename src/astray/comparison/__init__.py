"""Two runs → a Comparison: `rows → align → evidence → verdict → first`. The entry point is `comparison.compare`."""
