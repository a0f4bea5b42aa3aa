"""How far apart the two sides of a pair are, by the best that both sides kept."""
