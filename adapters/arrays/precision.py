"""Run array code in a narrow dtype: its arguments are cast, and NumPy's own kernels run."""

from anynan._apps.precision.watch import Narrow
from anynan.arrays.observe import ArrayTarget


class Narrowed(ArrayTarget, Narrow):
    """Run one function in narrow dtypes: it has no layers, and few kernels to skip."""

    framework = "array code"


narrowed_of = Narrowed.of
