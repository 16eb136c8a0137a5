"""From a cluster to a plan: every legal strategy priced, the best one explained."""
