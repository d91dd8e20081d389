"""Shards, lazy tensors, pending parameters, and the users of a tensor's memory."""
