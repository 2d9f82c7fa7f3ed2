"""The traced program of a function, evaluated again with readings."""
