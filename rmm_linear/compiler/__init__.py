"""Planned training steps as a backend of torch.compile."""
