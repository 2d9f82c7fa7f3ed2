"""What is read of a tensor, and where the readings are held."""
