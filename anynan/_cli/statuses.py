"""The exit statuses that commands which look at files share."""

FINE, BAD, UNREADABLE = 0, 1, 2
TOLD = "exit status: 0 nothing bad, 1 something bad, 2 a file that cannot be read"


def says(error: Exception) -> str:
    """Say what is wrong with a file, in one line."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)
