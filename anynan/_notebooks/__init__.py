"""Notebooks: magics, cells by their names, short tracebacks, reports as HTML."""
