"""What a traced program is made of: operations, layers, lines and names."""
