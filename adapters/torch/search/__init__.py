"""Find the first batch that a step goes bad on."""
