"""The differences that are listed, each with its reason."""

from tests.wild.rows import Known

# What a column means in one suite, where it is not what one expects, and what ran once more.
NOTES = {
    "torch_operators": "The faults are PyTorch's own samples whose result is NaN or Inf by nature. "
    "All are detected and nearly all have their operation and cause.",
    "jax": "Measured with 55 more programs of JAX, haiku, jraph, numpyro, blackjax and optimistix, "
    "before tests of the adapter and public scripts took their place.",
    "libraries": "Measured with 302 calls, of which those that differ most are left. Not "
    "silent are the calls that take a plain array out of the tracked one, for compiled code: a "
    "warning names the line and says that nothing is watched there. None is an alarm. After "
    "such a call (`0/0 after`) a bad result is detected, and operation and line come from "
    "NumPy's own error log, which does not tell 0/0 from inf/inf. A NaN argument that the "
    "library refuses itself is a suspect beside its exception. Errors and what is not detected "
    "are a few calls that take no array but NumPy's own.",
    "transformers": "Not silent at the level `operation` are models that make a -Inf and mask it "
    "(a logarithm of 0 in relative positions): recorded as a suspect, never an alarm. Measured "
    "with three more architectures (swinv2, bit, poolformer).",
    "diffusers": "Measured with five more models.",
    "torch_geometric": "Measured with six more networks.",
    "torchvision": "Measured with four detectors more.",
    "keras_tensorflow": "Measured with four more applications and two more layers.",
    "array_api": "Each case is a file of the public array-api-tests: identical means that every "
    "test that passes on the plain library passes on the tracked one.",
}

HIDDEN = (
    "this level also shows what is made and hidden again, as an Inf that is masked: recorded as "
    "suspect and contained, never bad"
)
REGROUPED = (
    "documented: TensorFlow's graph optimizer regroups sums where nothing else uses the values "
    "between; without {} it is bit for bit the same"
)
FIRST_USE = (
    "the weight is named at its first use, with the right layer and cause, and not in the phase of "
    "parameters"
)
IN_PARTS = (
    "encoder and decoder are called past the model, so there is no call to run again: the note "
    "says why no operation is named, "
)
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


def hidden(suite: str, said: str, *cases: str) -> list[Known]:
    """List what the level that shows each operation shows more."""
    of = cases or ("*",)
    return [Known(suite, case, "silent", HIDDEN, level="operation", said=said) for case in of]


KNOWN = [
    Known(
        "keras_jax",
        "*",
        "silent",
        "a layer that Keras does not compile on JAX: the warning says that it is compiled while it "
        "is tracked",
        said="*you compiled the model with run_eagerly=True or jit_compile=False*",
    ),
    Known("keras_jax", "*", "nan weight.layer", FIRST_USE, said="*layer target*bad_parameter*"),
    *(
        Known("keras_tensorflow", case, "identical", REGROUPED.format(what), level="layer")
        for case, what in {
            "MobileNetV2": "`arithmetic_optimization` and `remapping`",
            "MobileNetV3Small": "`arithmetic_optimization` and `remapping`",
            "NASNetMobile": "`arithmetic_optimization` and `remapping`",
            "ResNet50": "`arithmetic_optimization` and `remapping`",
            "InceptionResNetV2": "all its passes",
        }.items()
    ),
    Known(
        "torch_operators",
        "prod",
        "identical",
        "under any dispatch mode, an empty one too, PyTorch takes another formula for the gradient "
        "of `prod`: the last bits differ",
        level="operation",
    ),
    Known(
        "torch_operators",
        "nn.functional.ctc_loss",
        "silent",
        "its second result, read by nobody, is not written whole: what was in that memory is "
        "recorded as suspect and contained, never bad",
        level="operation",
        said="*suspect n* forward *",
    ),
    Known(
        "torch_operators",
        "torch._scaled_mm",
        "by nature.cause",
        "no rule knows what its result overflows: the operation is named",
        said="*unknown*",
    ),
    Known(
        "torch_operators",
        "masked.log_softmax",
        "by nature.*",
        "-Inf alone is a suspect, as masks are made of it, and is not looked into",
        said="*suspect neginf*",
    ),
    *hidden(
        "torch_operators",
        "*suspect posinf backward*",
        "linalg.norm.subgradients_at_zero",
        "masked.logaddexp",
    ),
    *hidden("torch_geometric", "*suspect posinf forward * pow power_domain*"),
    *hidden("transformers", "suspect neginf forward * log log_of_zero*"),
    *hidden("transformers", "suspect neginf forward * add overflow_in_dtype*", "imagegpt"),
    *hidden("transformers", "suspect neginf forward * add overflow_in_dtype*", "gpt_neo"),
    Known(
        "transformers",
        "*",
        "silent",
        "-Inf leaves a layer as a mask does: recorded as suspect, never bad",
        said="suspect neginf forward model.layers.*.self_attn.compressor*",
    ),
    Known(
        "diffusers",
        "AutoencoderKL in parts",
        "scale.*",
        IN_PARTS + "and the layer is right",
        said="*unknown",
    ),
    Known(
        "diffusers",
        "AutoencoderKL in parts",
        "root.*",
        IN_PARTS + "and that which layer was first is not known",
        level="step",
        said="*unknown",
    ),
    Known(
        "jax",
        "equinox_attention",
        "nan weight.layer",
        FIRST_USE + ": the optimizer keeps one moment, so weights and state look alike",
        said="*layer mlp.layers.0*bad_parameter*",
    ),
    Known("libraries", "sklearn.*Imputer", "0/0 after.*", LAST, said="*written_constant*"),
    Known("libraries", "*", "silent", TABLE, said="warning: anynan: the argument * is a *"),
    Known("libraries", "scipy.signal.welch", "identical", ROUNDED, said="*4.4e-16*"),
    Known("libraries", "*", "silent", OUT, said="warning: anynan: a plain array was taken out*"),
    Known("libraries", "*", "0/0 after.*", OUT, said="*no operation*"),
    Known("libraries", "*", "0/0 *.cause", SAID, said="*divide*unknown"),
    Known("libraries", "*", "0/0 before.*", OUT, said="*no operation*"),
    Known("libraries", "*", "NaN argument.*", OUT, said="*forward*no operation*"),
    Known("libraries", "*", "0/0 before.detected", REFUSED, said="*ended with *rror(*"),
    Known("libraries", "scipy.sparse.*", "*", CLASS, said="*type not understood*"),
    Known("libraries", "statsmodels.ARIMA", "*", CLASS, said="*unrecognized data structures*"),
]
