"""Autotuning: candidates that compute the same are measured, and all ranks of a group take the same one."""
