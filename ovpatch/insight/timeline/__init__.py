"""Where the time of a training step goes on each rank: computing, communicating unseen, communicating, or nothing."""
