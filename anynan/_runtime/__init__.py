"""Where the program is: its scopes, its threads, its interrupts."""
