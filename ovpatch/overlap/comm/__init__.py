"""Collectives, work handles, and how ranks agree."""
