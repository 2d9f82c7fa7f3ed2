"""One step: its rows are opened, written, read and closed."""
