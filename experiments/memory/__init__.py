"""Compare what Transformers keep for their backward pass: exact, checkpointed, and with sketched linear layers."""
