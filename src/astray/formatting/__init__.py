"""How text, numbers and tables are laid out, for a terminal and for reports."""
