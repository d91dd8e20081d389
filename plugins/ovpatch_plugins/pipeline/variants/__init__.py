"""Pipelines that compute or place something else than those of torch."""
