"""Run somebody's training script and tell what happened: is it equal, is it faster, what is still exposed."""
