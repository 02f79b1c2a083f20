"""Checkpoints: where they come from, their formats, and the tensors they become."""
