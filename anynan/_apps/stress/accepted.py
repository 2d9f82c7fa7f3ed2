"""Findings that are accepted, each with the reason: in a mapping, or in a file."""

import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Accept = Mapping[str, str] | str | os.PathLike[str] | None

_FIELDS = {"finding", "reason", "target"}
_HEAD = "# Findings of anynan.stress that are accepted, each with the reason.\n"


@dataclass(frozen=True, slots=True)
class Accepted:
    """Hold what is accepted.

    Attributes:
        finding: A part of its words, or the operation and its line.
        reason: Why.
        target: What was run; None for every target.
    """

    finding: str
    reason: str
    target: str | None = None

    def covers(self, target: str, texts: Iterable[str]) -> bool:
        """Tell whether a finding is meant."""
        return self.target in (None, target) and any(self.finding in text for text in texts)


def accepted(accept: Accept) -> list[Accepted]:
    """List what ``accept=`` says.

    Raises:
        ValueError: If the file cannot be read, or a reason is missing.
    """
    if accept is None:
        return []
    if isinstance(accept, Mapping):
        return [_entry({"finding": x, "reason": why}, "accept=") for x, why in accept.items()]
    path = os.fspath(accept)
    return [_entry(item, path) for item in _tables(path)]


def _tables(path: str) -> list[Any]:
    try:
        with open(path, "rb") as file:
            data = tomllib.load(file)
    except OSError as error:
        msg = f"{path} cannot be read: {error.strerror}"
        raise ValueError(msg) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        msg = f"{path} is no TOML: {error}"
        raise ValueError(msg) from None
    found = data.pop("accepted", [])
    if data or not isinstance(found, list):
        msg = f"{path} holds more than tables [[accepted]]: {', '.join(data) or 'accepted'}"
        raise ValueError(msg)
    return found


def _entry(item: Any, where: str) -> Accepted:
    texts = isinstance(item, dict) and all(isinstance(x, str) and x for x in item.values())
    if not texts or not {"finding", "reason"} <= set(item) <= _FIELDS:
        msg = f"{where}: each accepted finding has a finding, a reason and maybe a target: {item}"
        raise ValueError(msg)
    return Accepted(**item)


def write(path: str, target: str, findings: Iterable[str], reason: str) -> None:
    """Add findings to a file, which is made if it is not there."""
    text = "" if os.path.exists(path) else _HEAD
    for finding in findings:
        fields = {"target": target, "finding": finding, "reason": reason}
        lines = [f"{key} = {json.dumps(x, ensure_ascii=False)}" for key, x in fields.items()]
        text += "\n".join(["", "[[accepted]]", *lines, ""])
    with open(path, "a", encoding="utf-8") as file:
        file.write(text)
