"""Plan what a training step keeps and what it computes again, and run the plan."""
