"""The time of a training step on each rank: compute, hidden and exposed communication, idling."""
