"""What is built on the stream of operations, and knows no framework."""
