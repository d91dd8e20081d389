"""Gradients of a backward: hooks, buckets, and their reduction."""
