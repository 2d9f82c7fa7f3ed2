"""The differences that are listed, each with its reason."""

from tests.wild.known_arrays import KNOWN_ARRAYS
from tests.wild.known_jax import KNOWN_JAX
from tests.wild.rows import Known

HIDDEN = (
    "this level also shows what is made and hidden again, as an Inf that is masked: recorded as "
    "suspect and contained, never bad"
)

# What a column means in one suite, where it is not what one expects.
NOTES = {
    "torch_operators": "The faults are PyTorch's own samples whose result is NaN or Inf by nature. "
    "All are detected and nearly all have their operation and cause.",
    "jax": "Measured with 41 more programs of JAX, before tests of the adapter took their place.",
    "libraries": "Measured with 302 calls, of which the 172 that differ most are left. Not "
    "silent are the calls that take a plain array out of the tracked one, for compiled code: a "
    "warning names the line and says that nothing is watched there. None is an alarm. After "
    "such a call (`0/0 after`) a bad result is detected, and operation and line come from "
    "NumPy's own error log, which does not tell 0/0 from inf/inf. A NaN argument that the "
    "library refuses itself is a suspect beside its exception. Errors and what is not detected "
    "are a few calls that take no array but NumPy's own.",
    "transformers": "Not silent at the level `operation` are models that make a -Inf and mask it "
    "(a logarithm of 0 in relative positions): recorded as a suspect, never an alarm.",
    "array_api": "Each case is a file of the public array-api-tests: identical means that every "
    "test that passes on the plain library passes on the tracked one.",
}

KNOWN: list[Known] = [
    Known(
        "keras_jax",
        "*",
        "silent",
        "a layer that Keras does not compile on JAX: the warning says that it is compiled while it "
        "is tracked",
        said="*you compiled the model with run_eagerly=True or jit_compile=False*",
    ),
    *(
        Known(
            "keras_tensorflow",
            case,
            "identical",
            "documented: TensorFlow's graph optimizer regroups sums where nothing else uses the "
            f"values between; without {what} it is bit for bit the same",
            level="layer",
        )
        for what, cases in (
            (
                "`arithmetic_optimization` and `remapping`",
                ("MobileNetV2", "MobileNetV3Small", "NASNetMobile", "ResNet50"),
            ),
            ("all its passes", ("InceptionResNetV2",)),
        )
        for case in cases
    ),
    Known(
        "torchvision",
        "FCOS",
        "silent",
        HIDDEN,
        level="operation",
        said="*suspect nan forward*sqrt sqrt_of_negative",
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
    *(
        Known(suite, case, "silent", HIDDEN, level="operation", said=f"*suspect posinf {where}*")
        for suite, case, where in (
            ("torch_operators", "linalg.norm.subgradients_at_zero", "backward"),
            ("torch_operators", "masked.logaddexp", "backward"),
            ("torch_geometric", "*", "forward * pow power_domain"),
        )
    ),
    *(
        Known(
            "diffusers",
            "AutoencoderKL in parts",
            what,
            "encoder and decoder are called past the model, so there is no call to run again: the "
            f"note says why no operation is named, {layer}",
            level=level,
            said="*unknown",
        )
        for what, level, layer in (
            ("scale.*", "*", "and the layer is right"),
            ("root.*", "step", "and that which layer was first is not known"),
        )
    ),
    Known(
        "transformers",
        "*",
        "silent",
        HIDDEN,
        level="operation",
        said="suspect neginf forward * log log_of_zero*",
    ),
    *(
        Known(
            "transformers",
            case,
            "silent",
            HIDDEN,
            level="operation",
            said="suspect neginf forward * add overflow_in_dtype*",
        )
        for case in ("imagegpt", "gpt_neo")
    ),
    Known(
        "transformers",
        "*",
        "silent",
        "-Inf leaves a layer as a mask does: recorded as suspect, never bad",
        said="suspect neginf forward model.layers.*.self_attn.compressor*",
    ),
    *KNOWN_ARRAYS,
    *KNOWN_JAX,
]
