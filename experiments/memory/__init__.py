"""Compare the bytes that Transformers keep for their backward pass: exact, checkpointed, and sketched."""
