"""The choice between candidates that compute the same, by measurement and the same on all ranks."""
