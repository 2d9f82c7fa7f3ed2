"""A picture of small numbers, one pixel each, with a palette."""

import base64
import struct
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def data_uri(pixels: NDArray[np.uint8], palette: Sequence[tuple[int, int, int]]) -> str:
    """Return a PNG as a ``data:`` address; the palette's first colour is transparent.

    Example:
        >>> import numpy as np
        >>> from anynan._runs.png import data_uri
        >>> data_uri(np.zeros((1, 1), np.uint8), [(0, 0, 0)])[:22]
        'data:image/png;base64,'
    """
    height, width = pixels.shape
    lines = np.zeros((height, width + 1), np.uint8)  # each begins with its filter: none
    lines[:, 1:] = pixels
    colours = bytes(part for colour in palette for part in colour)
    parts = (
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
        (b"PLTE", colours),
        (b"tRNS", b"\0"),
        (b"IDAT", zlib.compress(lines.tobytes(), 9)),
        (b"IEND", b""),
    )
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(held)) + kind + held + struct.pack(">I", zlib.crc32(kind + held))
        for kind, held in parts
    )
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")
