"""Schedules of pipelines that are simulated and solved, in pure Python. The runtime imports nothing of it."""
