"""Weights, and what trains them."""
