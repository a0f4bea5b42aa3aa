"""The first call that is wrong by itself, and what explains it."""
