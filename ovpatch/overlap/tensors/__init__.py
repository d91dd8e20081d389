"""Shards, lazy tensors, pending parameters, and the use of a tensor's memory."""
