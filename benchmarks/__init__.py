"""Benchmarks; each file is a program with its own usage line."""
