"""What is on, off and why; merged over the workers of a run."""
