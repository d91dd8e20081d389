"""Shards, lazy tensors, pending parameters, and who owns a tensor's memory."""
