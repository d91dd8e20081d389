"""A comparison of a script, stock and patched, step by step."""
