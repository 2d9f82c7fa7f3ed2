"""The session of one tracked function: its calls, its reads, what the core asks for."""
