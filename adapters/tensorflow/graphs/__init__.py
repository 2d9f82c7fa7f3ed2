"""What a traced graph is made of: operations, lines and names."""
