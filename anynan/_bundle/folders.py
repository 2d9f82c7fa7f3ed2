"""Folders that a bundle may be written to: nothing that is there is overwritten."""

import os


def free(folder: str) -> str:
    """Give the folder, or a numbered one beside it, that nothing is in."""
    number, found = 1, folder
    while os.path.lexists(found) and not _is_empty(found):
        number += 1
        found = f"{folder}-{number}"
    return found


def refuse_full(folder: str) -> None:
    """Refuse a folder that something is in.

    Raises:
        FileExistsError: If there is something.
    """
    if os.path.lexists(folder) and not _is_empty(folder):
        msg = f"{folder} is there already, and not empty: a bundle overwrites nothing"
        raise FileExistsError(msg)


def _is_empty(folder: str) -> bool:
    return os.path.isdir(folder) and not os.listdir(folder)
