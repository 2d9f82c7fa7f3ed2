"""Programs in JAX's libraries, written as their users write them."""
