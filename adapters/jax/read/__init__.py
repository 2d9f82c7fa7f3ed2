"""What is read of an array, and how readings are joined."""
