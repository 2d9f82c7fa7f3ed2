"""What the readings say of steps to come, of layers that do nothing, and of narrower dtypes."""
