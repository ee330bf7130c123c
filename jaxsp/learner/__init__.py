"""From trajectories to an update: advantages, batches, losses, the jitted step."""
