"""How the script of a bundle calls TensorFlow: a raw operation, with its attributes."""

import re

from anynan._calls.calls import Words, refuse
from anynan._calls.dialect import Dialect, of_numpy
from anynan.arrays.bundle import SHOW

_HEAD = f"""
from pathlib import Path

import numpy as np
import tensorflow as tf
from safetensors.numpy import load_file

loaded = load_file(Path(__file__).with_name("tensors.safetensors"))

{SHOW}
"""
_FUNCTION = re.compile(r"[A-Z][A-Za-z0-9]{0,60}")
# They reach files, Python, other functions or other machines.
_REFUSED = re.compile(
    r"File|Save|Restore|Func|Call|Dataset|Iterator|Print|Debug|Summary|Load|Resource|Variable|"
    r"Queue|Reader|Table|Send|Recv|Python|Writer|Checkpoint|Service|Rpc|^If$|^While$|Stateless(If|While|Case)|^Case$"
)
_DTYPE = re.compile(r"(b?float|u?int|complex)\d+(_e\dm\d(fn)?)?|bool|half|double")


def _function(name: str) -> str:
    if not _FUNCTION.fullmatch(name) or _REFUSED.search(name):
        refuse(f"{name[:40]!r} is not run")
    return f"tf.raw_ops.{name}"


_READY = of_numpy("tf.as_dtype({}).as_numpy_dtype")
DIALECT = Dialect("tensorflow", _HEAD, Words(_DTYPE, "tf.{}"), _function, _READY)
