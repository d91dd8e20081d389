"""Schedules of pipelines at run time: orders, the programs made from them, and the messages between ranks."""
