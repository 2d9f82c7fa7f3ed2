"""The differences that are listed, each with its reason."""

from tests.wild.rows import Known

KNOWN: list[Known] = []
