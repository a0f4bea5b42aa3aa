"""A Comparison → text, CSV, a workbook, JSON, JUnit XML, HTML for notebooks, a DataFrame."""
