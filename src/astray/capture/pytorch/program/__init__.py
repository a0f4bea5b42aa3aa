"""A program that knows nothing of astray: its outermost modules, its steps, and transformers' Trainer."""
