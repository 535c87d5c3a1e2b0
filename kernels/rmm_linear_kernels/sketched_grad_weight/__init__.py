"""The weight gradient out of two sketches."""
