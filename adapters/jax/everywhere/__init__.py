"""A program that tracks nothing itself: what it compiles, differentiates and reads."""
