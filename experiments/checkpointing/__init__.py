"""Checkpointing by published planners: what they promise, and what is measured."""
