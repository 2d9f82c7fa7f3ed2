"""What ``anynan doctor`` tells of CuPy."""

import cupy

WATCHED = "functions over arrays, and single arrays"
UNWATCHED = "what raw kernels do inside"


def devices() -> list[str]:
    """List the devices that CuPy sees."""
    runtime = cupy.cuda.runtime
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        return [f"no device: {error}"]
    return [runtime.getDeviceProperties(i)["name"].decode() for i in range(count)]
