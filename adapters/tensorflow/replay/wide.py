"""Run one operation again in a wider dtype."""

from typing import Any

import numpy as np
import tensorflow as tf

from anynan.tensorflow.read.probes import is_bad

NARROW = (tf.float16.as_datatype_enum, tf.float32.as_datatype_enum, tf.bfloat16.as_datatype_enum)


def widened(node: Any, inputs: list[str], arrays: list[Any]) -> float | None:
    """Give a result's largest magnitude in a wider dtype, None if it is not finite there."""
    if any(is_bad(x) for x in arrays):
        return None
    narrow = all(t.dtype == tf.float16 for t in node.inputs if t.dtype.is_floating)
    target = tf.float32 if narrow else tf.float64
    held = dict(zip(inputs, arrays, strict=True))
    wide: list[Any] = []
    for tensor in node.inputs:
        if tensor.name in held:
            wide.append(tf.constant(np.asarray(held[tensor.name], np.float64), target))
        else:
            value = tf.get_static_value(tensor)
            if value is None:
                return None
            wide.append(tf.constant(value, tensor.dtype))
    definition = tf.compat.v1.GraphDef()
    made = definition.node.add()
    made.CopyFrom(node.node_def)
    made.name = "wide"
    made.device = ""
    del made.input[:]
    for name in ("T", "DstT"):
        if name in made.attr and made.attr[name].type in NARROW:
            made.attr[name].type = target.as_datatype_enum
    if "SrcT" in made.attr:
        made.attr["SrcT"].type = target.as_datatype_enum
    for key in ("_output_shapes", "_class"):
        if key in made.attr:
            del made.attr[key]
    for i, value in enumerate(wide):
        holder = definition.node.add()
        holder.name, holder.op = f"in{i}", "Placeholder"
        holder.attr["dtype"].type = value.dtype.as_datatype_enum
        made.input.append(f"in{i}")

    def run(*args: Any) -> Any:
        return tf.graph_util.import_graph_def(
            definition, input_map={f"in{i}:0": x for i, x in enumerate(args)},
            return_elements=["wide:0"], name="",
        )  # fmt: skip

    try:
        made_function = tf.compat.v1.wrap_function(
            run, [tf.TensorSpec(x.shape, x.dtype) for x in wide]
        )
        (out,) = made_function(*wide)
    except (ValueError, TypeError, tf.errors.OpError):
        return None
    host = np.asarray(out)
    if not host.size or is_bad(host):
        return None
    return float(np.abs(host.astype(np.float64)).max()) or None
