"""One-sided reads of tensors on other ranks, without a collective."""
