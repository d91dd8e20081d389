"""Feature ``dist_optimizer``: each rank updates its shard of every parameter and keeps that shard of the state."""
