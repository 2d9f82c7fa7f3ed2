"""Differences of array code that are listed."""

from tests.wild.rows import Known

OUT = (
    "documented: what a library computes from the plain array that it asked for is not watched, "
    "which the warning says with the line; a bad result of it is reported without an operation"
)
CLASS = (
    "documented: code that takes nothing but its own library's class refuses the stand-in of a "
    "tracked array; the exception has a note that names the stand-in and the line"
)
REFUSED = (
    "the library refuses the NaN with an exception of its own, so no bad value leaves the "
    "function; that exception does not carry the report of the division yet"
)
LAST = (
    "documented: a bad result of plain arrays is put down to the last bad value that was taken "
    "out, here the missing values that the function writes for the imputer"
)
TABLE = "documented: operations on tables and labelled arrays are not watched, which is said"
ROUNDED = (
    "welch asks whether its signal `is` what asarray made of it, which no stand-in can be, and "
    "goes by the formula for two signals, which rounds otherwise"
)
SAID = (
    "after a plain array was taken out the operation and its line come from NumPy's own error log, "
    "which does not have the operands: an invalid division is 0/0 or inf/inf"
)
KNOWN_ARRAYS = [
    Known("libraries", "sklearn.*Imputer", "0/0 after.*", LAST, said="*written_constant*"),
    Known("libraries", "*", "silent", TABLE, said="warning: anynan: the argument * is a *"),
    Known("libraries", "scipy.signal.welch", "identical", ROUNDED, said="*4.4e-16*"),
    Known("libraries", "*", "silent", OUT, said="warning: anynan: a plain array was taken out*"),
    Known("libraries", "*", "0/0 after.*", OUT, said="*no operation*"),
    Known("libraries", "*", "0/0 after.cause", SAID, said="*divide*unknown"),
    Known("libraries", "*", "0/0 before.cause", SAID, said="*divide*unknown"),
    Known("libraries", "*", "0/0 before.*", OUT, said="*no operation*"),
    Known("libraries", "*", "NaN argument.*", OUT, said="*forward*no operation*"),
    Known("libraries", "*", "0/0 before.detected", REFUSED, said="*ended with *rror(*"),
    Known("libraries", "scipy.sparse.*", "*", CLASS, said="*type not understood*"),
    Known("libraries", "statsmodels.ARIMA", "*", CLASS, said="*unrecognized data structures*"),
]
