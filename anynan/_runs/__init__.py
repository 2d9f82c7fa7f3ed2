"""A whole run in words, in numbers and as a page; what its readings say of steps to come."""
