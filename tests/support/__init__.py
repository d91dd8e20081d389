"""Support for the tests: a pool of ranks, programs that run to their end, and the guard that nothing stays patched."""
