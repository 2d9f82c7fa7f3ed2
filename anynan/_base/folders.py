"""Folders that a bundle may be written to: nothing that is there is overwritten."""

import os


def free(folder: str) -> str:
    """Give the folder, or a numbered one beside it, that nothing is in."""
    number, found = 1, folder
    while os.path.lexists(found) and not _is_empty(found):
        number += 1
        found = f"{folder}-{number}"
    return found


def refuse_unwritable(folder: str) -> None:
    """Refuse a folder that nothing could be written to: it is made when something is bad.

    Raises:
        OSError: If it is a file or lies in one, or its owner lets nobody write there.
    """
    place = os.path.abspath(folder)
    while not os.path.lexists(place):
        place = os.path.dirname(place)
    if not os.path.isdir(place) or not os.access(place, os.W_OK):
        why = "nobody may write there" if os.path.isdir(place) else "it is no folder"
        msg = f"save={folder!r} cannot be written: {place}: {why}"
        raise OSError(msg)


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
