"""A running program → records. The engine knows no framework; each framework has an adapter in a folder of its own."""
