"""Rows of a comparison that were asked for: filtered, sorted, as text.

columns.py     every column by name
filter.py      the language of `--filter`
pairs.py       the selected rows, in order; as Arrow and pandas
row_table.py   rows as a table for a terminal
"""
