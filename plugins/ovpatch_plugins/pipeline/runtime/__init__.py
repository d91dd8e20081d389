"""The engine that runs the program of a rank, and its stages."""
