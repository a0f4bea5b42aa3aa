"""How text, numbers and tables are laid out, for a terminal and for reports.

figures.py    numbers, with as many digits as a reader can use
page.py       a screen of text: labelled entries, folded lines, tables, colours
terminal.py   the terminal of a command: width, colours, a progress bar
"""
