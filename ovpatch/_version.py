"""The version, alone in a file so that the build can read it without importing torch."""

__version__ = "0.1.0.dev0"

#: The oldest torch that is supported. The package requires torch without a version, so that pip never replaces one.
OLDEST_TORCH = (2, 11)
