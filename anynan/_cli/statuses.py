"""The exit statuses that commands which look at files share."""

FINE, BAD, UNREADABLE = 0, 1, 2
TOLD = "exit status: 0 nothing bad, 1 something bad, 2 a file that cannot be read"
