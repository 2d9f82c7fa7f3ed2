"""``anynan run``: a whole program, watched as it is."""
