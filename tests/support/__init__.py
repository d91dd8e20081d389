"""What the tests share: a pool of ranks, whole programs, and the guard that nothing stays patched."""
