"""Which tensor of one run is which of the other."""
