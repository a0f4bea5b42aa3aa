"""What users try with a suspect, and perturbed inputs to calibrate a comparison.

determinism.py   no dropout, the same seed, the same bits
elsewhere.py     one module, or one function in it, on another device or in another dtype
perturbation.py  inputs changed by a rounding
"""
