"""Where the program is (scopes, threads, interrupts), and text of its own made safe to print."""
