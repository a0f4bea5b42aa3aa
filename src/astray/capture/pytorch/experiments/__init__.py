"""What users try with a suspect: the same seed, no dropout, one module on another device or in another dtype."""
