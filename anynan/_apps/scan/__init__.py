"""What files of weights hold."""
