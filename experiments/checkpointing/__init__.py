"""Checkpointing by published planners: their plans, and measurements."""
