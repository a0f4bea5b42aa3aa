"""The sections of benchmarks/gpu.py, one module each: `run(work, report)` measures and prints its tables."""
