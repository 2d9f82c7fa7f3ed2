"""Code that torch.compile made of a model."""
