"""Feature ``dist_optimizer``: each rank updates its part of every parameter, and keeps that part of the state."""
