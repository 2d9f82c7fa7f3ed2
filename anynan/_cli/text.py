"""The text that the demos train on: paragraphs of Python's own help, as numbers."""

import random
import re
from pydoc_data.topics import topics

import numpy as np
from numpy.typing import NDArray

HEADING = re.compile(r"^.+\n([*=\-\"])\1{2,}$", re.MULTILINE)
PAD = 0


class Text:
    """Draw paragraphs, and number their characters.

    They come longest first, so that a batch that does not fit into memory is the first one. A
    paragraph that was only a heading is left empty: this is what some of the bugs trip over.

    Args:
        seed: Says which paragraphs.
        size: How many.
    """

    def __init__(self, seed: int, size: int) -> None:
        pieces = [piece for text in topics.values() for piece in text.split("\n\n")]
        pieces = [HEADING.sub("", piece).strip() for piece in pieces]
        chosen = random.Random(seed).sample(pieces, size)  # noqa: S311  no secret
        self.paragraphs = sorted(chosen, key=len, reverse=True)
        letters = sorted(set("".join(self.paragraphs)))
        self.numbers = {letter: i + 1 for i, letter in enumerate(letters)}

    def rows(self, start: int, size: int, width: int) -> NDArray[np.int32]:
        """Give some paragraphs as rows of numbers, cut or padded on the right.

        Args:
            start: The first one.
            size: How many.
            width: Of a row.
        """
        rows = np.full((size, width), PAD, np.int32)
        for row, text in zip(rows, self.paragraphs[start : start + size], strict=True):
            numbers = [self.numbers[letter] for letter in text[:width]]
            row[: len(numbers)] = numbers
        return rows
