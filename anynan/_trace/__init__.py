"""One run, operation by operation, as every framework tells it: what products are built on."""
