"""Tools that run a training script and show whether it computes the same, is faster, and what is still exposed."""
