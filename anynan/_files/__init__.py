"""Look for bad values in files of weights and arrays, without loading or running them."""
