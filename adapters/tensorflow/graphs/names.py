"""TensorFlow's names of operations in the field's own words."""

TYPES = {
    "Sub": "subtract", "Mul": "multiply", "RealDiv": "divide", "Div": "divide", "AddV2": "add",
    "AddN": "add", "BiasAdd": "add", "Neg": "negative", "FloorDiv": "floor_divide",
    "DivNoNan": "divide", "Xdivy": "divide", "MulNoNan": "multiply",
    "SquaredDifference": "square", "FloorMod": "remainder", "Mod": "remainder",
    "BatchMatMul": "matmul", "BatchMatMulV2": "matmul", "BatchMatMulV3": "matmul",
    "Conv1D": "convolution", "Conv2D": "convolution", "Conv3D": "convolution",
    "DepthwiseConv2dNative": "convolution", "Conv2DBackpropInput": "convolution",
    "Conv3DBackpropInputV2": "convolution", "Select": "where", "SelectV2": "where",
    "Fill": "full", "ZerosLike": "zeros", "OnesLike": "ones", "PadV2": "pad",
    "MirrorPad": "pad", "Cast": "astype", "TensorScatterUpdate": "index_put",
    "ScatterNd": "scatter", "ConcatV2": "concat", "Pack": "stack", "GatherV2": "take",
    "GatherNd": "take", "StridedSlice": "getitem", "Slice": "getitem",
    "LogSoftmax": "log_softmax", "FusedBatchNorm": "batch_norm",
    "FusedBatchNormV2": "batch_norm", "FusedBatchNormV3": "batch_norm", "Relu6": "relu",
    "LeakyRelu": "leaky_relu", "MaxPool": "max_pool", "AvgPool": "avg_pool",
    "MatrixBandPart": "tril", "MatrixInverse": "inv", "MatrixSolve": "solve",
    "MatrixTriangularSolve": "solve", "MatrixDeterminant": "det",
    "LogMatrixDeterminant": "slogdet", "SelfAdjointEigV2": "eigh", "ClipByValue": "clip",
    "Inv": "reciprocal", "UnsortedSegmentSum": "scatter_add", "SegmentSumV2": "scatter_add",
    "TensorScatterAdd": "scatter_add", "L2Loss": "sum",
    "SoftmaxCrossEntropyWithLogits": "cross_entropy",
    "SparseSoftmaxCrossEntropyWithLogits": "cross_entropy", "CTCLossV2": "ctc_loss",
    "StatelessWhile": "while", "StatelessIf": "cond", "If": "cond", "Case": "cond",
    "PartitionedCall": "function", "StatefulPartitionedCall": "function",
    "BesselK0": "modified_bessel_k0", "BesselK0e": "scaled_modified_bessel_k0",
    "BesselK1": "modified_bessel_k1", "BesselK1e": "scaled_modified_bessel_k1",
    "BesselY0": "bessel_y0", "BesselY1": "bessel_y1", "CumulativeLogsumexp": "logsumexp",
    "ArgMax": "argmax", "Ndtri": "ndtri", "Zeta": "zeta", "TopKV2": "top_k",
    "RandomUniform": "random", "RandomStandardNormal": "random",
}  # fmt: skip

# Operations that only hand on what they are given.
PASSING = frozenset(
    {
        "Identity", "IdentityN", "StopGradient", "PreventGradient", "Snapshot", "Reshape",
        "Squeeze", "ExpandDims", "Transpose", "ReadVariableOp", "EnsureShape", "CheckNumerics",
    }
)  # fmt: skip
OPAQUE = {
    "While": "loop", "StatelessWhile": "loop", "If": "branch", "StatelessIf": "branch",
    "Case": "branch", "PartitionedCall": "tf.function", "StatefulPartitionedCall": "tf.function",
}  # fmt: skip
RANDOM = frozenset(
    {
        "RandomUniform", "RandomStandardNormal", "TruncatedNormal", "RandomUniformInt",
        "RandomShuffle", "Multinomial", "RandomGamma", "ParameterizedTruncatedNormal",
    }
)  # fmt: skip
# How many outputs are results, where there are others.
RESULTS = {
    "FusedBatchNorm": 3, "FusedBatchNormV2": 3, "FusedBatchNormV3": 3,
    "FusedBatchNormGrad": 3, "FusedBatchNormGradV2": 3, "FusedBatchNormGradV3": 3,
}  # fmt: skip
BINARY = ("self", "other")
OPERANDS = {
    "Pow": ("self", "exponent"),
    "Select": ("self", "other"),
    "SelectV2": ("self", "other"),
    "PadV2": ("self", "value"),
    "BiasAdd": ("self", "other"),
    "ClipByValue": ("self", "min", "max"),
}


def operation(kind: str) -> str:
    """Give the canonical name of an operation's type."""
    return TYPES.get(kind, kind.lower())


def operand(kind: str, i: int) -> str:
    """Name a float operand by its position among the float operands."""
    known = OPERANDS.get(kind, BINARY)
    if kind in ("ConcatV2", "Pack", "AddN"):
        return f"arrays[{i}]"
    return known[i] if i < len(known) else f"operand{i}"


def gradient_of(function: str) -> str | None:
    """Give the type whose gradient a function of TensorFlow's computes, None if it is none."""
    if not function.startswith("_") or "Grad" not in function:
        return None
    return plain(function[1:].partition("Grad")[0])


def plain(kind: str) -> str:
    """Give a type without its version, in small letters."""
    return kind.rstrip("0123456789").removesuffix("V").lower()
