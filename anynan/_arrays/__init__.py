"""Arrays of any library: reached, looked at, summarised."""
