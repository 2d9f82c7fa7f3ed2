"""Situations that fire each row of the table of causes, and near misses that must not."""

import math
from dataclasses import replace
from typing import Any

from anynan._base.summary import Summary
from anynan._diagnosis.causes import Situation
from anynan._diagnosis.lineage import Operand, OpRecord
from anynan.events import STATE, Source

INF, NAN = math.inf, math.nan
NOISE = ((396, 62.5), (397, 0.29), (398, 8.6), (399, 18.9))
CLIMB = ((396, 0.9), (397, 3.1), (398, 48.0), (399, 7200.0))


def held(*values: float, dtype: str = "float32", shape: tuple[int, ...] | None = None) -> Summary:
    """Summarise some numbers."""
    finite = [v for v in values if math.isfinite(v)]
    bad = [(i,) for i, v in enumerate(values) if not math.isfinite(v)]
    return Summary(
        shape or (len(values),),
        dtype,
        "cpu",
        len(values),
        nan=sum(v != v for v in values),
        posinf=values.count(INF),
        neginf=values.count(-INF),
        zero=values.count(0.0),
        min=min(finite, default=None),
        max=max(finite, default=None),
        absmax=max(map(abs, finite), default=None),
        headroom=3.0 if finite else None,
        first_bad=next(iter(bad), None),
    )


def op(
    name: str,
    out: float = NAN,
    *,
    phase: Any = "forward",
    dtype: str = "float32",
    text: str = "",
    **operands: Any,
) -> OpRecord:
    """Record an operation: an operand is a number, a Summary, an Operand, or a plain argument."""
    plain = {"params", "wide", "feeds", "forward", "value"} & operands.keys()
    extra = {key: operands.pop(key) for key in plain}
    items = []
    for key, x in operands.items():
        if isinstance(x, Operand):
            items.append(x)
        elif isinstance(x, Summary):
            items.append(Operand(key, x))
        else:
            items.append(Operand(key, held(float(x.real), dtype=dtype), x))
    source = Source("model.py", 7, "forward", text) if text else None
    made = held(out, dtype=dtype)
    return OpRecord(0, name, name, "block", phase, made, tuple(items), source, **extra)


TOO_LARGE = Operand("other", held(INF, dtype="float16"), INF, source="constant")


def case(record: OpRecord | None = None, **fields: Any) -> Situation:
    """Describe a failure by its origin."""
    phase = fields.pop("phase", "forward" if record is None else record.phase)
    kind = fields.pop("kind", None)
    if kind is None:
        kind = "nan" if record is None or record.output is None else record.output.kind
    return Situation(phase, kind, "block", record=record, **fields)


def back(name: str, out: float = NAN, **operands: Any) -> Situation:
    """Describe a failure of a gradient."""
    operands.setdefault("grad", 1.0)
    return case(op(name, out, phase="backward", **operands))


def outside(source: Any, label: str, *values: float, name: str = "self") -> Situation:
    item = Operand(name, held(*values), values[0], source=source, label=label)
    operands: dict[str, Any] = {name: item, "other": 2.0}
    return case(op("multiply", **operands))


ZEROS = held(0.0, 0.0, dtype="float16")
VEC = held(*[1.0] * 6, dtype="float16", shape=(6,))
BATCH = held(NAN, 1.0, 2.0, NAN, shape=(2, 2))

FIRES: dict[str, list[Situation]] = {
    "uninitialised_memory": [outside("uninitialised", "buffer", NAN)],
    "overwritten_input": [
        outside("overwritten", "x", NAN),
        case(summary=BATCH, tensor="x", overwritten=True),
    ],
    "bad_label": [
        case(phase="input", summary=BATCH, rows=(0, 1), tensor="batch['labels']"),
        outside("input", "batch['target']", NAN, name="target"),
    ],
    "bad_input": [
        case(phase="input", summary=BATCH, rows=(0, 1)),
        case(phase="input", summary=BATCH, tensor="y", sole=True),
    ],
    "running_statistics_bad": [
        case(phase="parameter", parameter="norm.running_var", summary=held(NAN)),
        outside("buffer", "norm.running_mean", NAN),
    ],
    "bad_parameter": [
        case(phase="parameter", parameter="fc.weight", summary=held(NAN), since=(400, 412)),
        outside("parameter", "fc.weight", NAN),
        outside("buffer", "table", INF),
    ],
    "where_gradient_trap": [
        back("sqrt", grad=0.0, result=0.0, feeds=("where",)),
        back("divide", grad=0.0, self=1.0, other=0.0, forward=3),
        case(op("log", -INF, self=0.0, value=-INF), surfaced="backward"),
        case(op("divide", INF, self=1.0, other=0.0), phase="backward"),
        case(op("exp", INF, self=200.0), surfaced="backward"),
    ],
    "cosine_of_zero_vector": [
        case(op("divide", self=0.0, other=0.0, text="s = cosine_similarity(a, b, eps=0)")),
        case(op("divide", self=0.0, other=0.0, text="x = F.normalize(x, eps=0)")),
    ],
    "epsilon_underflow": [
        case(op("divide", self=0.0, other=0.0, dtype="float16", text="x / (y + 1e-8)")),
        case(op("log", -INF, self=0.0, dtype="float16", text="loss = -log(p + 1e-12)")),
        case(op("log", -INF, self=0.0, text="log(1 - p.clamp(1e-8, 1 - 1e-8))")),
        case(op("rsqrt", INF, self=0.0, dtype="float16", params={"eps": 1e-12})),
        back("sqrt", INF, result=0.0, dtype="float16", text="sqrt(v + 1e-8)"),
    ],
    "log_of_negative": [case(op("log", self=-0.5)), case(op("log1p", self=-1.5))],
    "log_of_zero": [
        case(op("log", -INF, self=0.0)),
        case(op("log", -INF, self=0j)),
        case(op("xlogy", -INF, self=1.0, other=0.0)),
    ],
    "logit_of_zero_or_one": [case(op("logit", -INF, self=0.0)), case(op("logit", self=1.5))],
    "binary_cross_entropy_saturated": [case(op("binary_cross_entropy", INF, self=0.0, target=1.0))],
    "kl_div_domain": [
        case(op("kl_div", self=0.0, target=-1.0)),
        case(op("kl_div", self=-INF, target=0.0)),
    ],
    "divide_by_zero": [
        case(op("divide", INF, self=1.0, other=0.0)),
        case(op("divide", self=0.0, params={"other": 0.0})),
        case(op("divide", self=held(0.0, 1.0), other=held(0.0, 1.0))),
        case(op("reciprocal", INF, self=0.0)),
        case(op("rsqrt", INF, self=0.0)),
        case(op("layer_norm", self=held(1.0, 1.0), params={"eps": 0.0})),
        case(op("batch_norm", self=1.0, running_var=held(0.0, 1.0), params={"eps": 0.0})),
    ],
    "inf_over_inf": [case(op("divide", self=INF, other=INF))],
    "remainder_by_zero": [case(op("remainder", self=1.0, other=0.0))],
    "sqrt_of_negative": [
        case(op("sqrt", self=-0.5)),
        case(op("sqrt", self=held(-1e-9, 2.0))),
        case(op("batch_norm", self=1.0, running_var=held(-1.0, 1.0), params={"eps": 1e-5})),
    ],
    "power_domain": [
        case(op("pow", INF, self=0.0, params={"exponent": -1})),
        case(op("pow", self=-2.0, params={"exponent": 0.5})),
        case(op("pow", self=-2.0, exponent=0.5)),
    ],
    "inverse_trig_domain": [case(op("acos", self=1.0000001)), case(op("atanh", INF, self=1.0))],
    "index_out_of_range": [
        case(op("take", self=held(1.0), params={"index": 9, "entries": 4, "outside": 1})),
    ],
    "ctc_target_too_long": [
        case(op("ctc_loss", INF, log_probs=-1.0, params={"sample": 1, "needed": 6, "frames": 5}))
    ],
    "lgamma_pole": [case(op("lgamma", INF, self=-1.0)), case(op("lgamma", INF, self=0.0))],
    "special_function_domain": [
        case(op("bessel_y0", self=-2.5)),
        case(op("modified_bessel_k1", INF, self=0.0)),
        case(op("ndtri", self=held(1.5))),
        case(op("igamma", self=-1.0, other=2.0)),
        case(op("igammac", self=0.0, other=0.0)),
        case(op("zeta", INF, self=1.0, other=2.0)),
    ],
    "trig_of_inf": [case(op("tan", self=INF)), case(op("sin", self=held(-INF)))],
    "singular_matrix": [case(op("inv", A=held(0.0, 0.0, 0.0, 0.0, shape=(2, 2))))],
    "softmax_of_inf": [
        case(op("softmax", self=held(INF, 1.0))),
        case(op("attention", query=held(1.0), key=held(INF))),
    ],
    "softmax_fully_masked": [
        case(op("softmax", self=held(-INF, -INF), params={"masked_rows": 2})),
        case(op("log_softmax", self=held(-INF, -INF))),
        case(op("attention", query=held(1.0), attn_mask=held(-INF, -INF))),
        case(op("attention", query=held(1.0), attn_mask=held(0.0, 1.0, dtype="bool"))),
        back("logsumexp", self=held(-INF), result=held(-INF)),
    ],
    "target_class_masked": [case(op("nll_loss", INF, self=held(-INF, -0.1)))],
    "inf_minus_inf": [
        case(op("subtract", self=INF, other=INF)),
        case(op("add", self=INF, other=-INF)),
        case(op("add", self=INF, other=INF, params={"alpha": -1})),
        case(op("sum", self=held(INF, -INF))),
        case(op("matmul", self=held(INF, -INF), mat2=held(1.0, 1.0))),
    ],
    "zero_times_inf": [
        case(op("multiply", self=0.0, other=-INF)),
        case(op("matmul", self=held(0.0, 1.0), mat2=held(INF, 1.0))),
        case(op("prod", self=held(0.0, INF))),
        back("multiply", grad=0.0, other=INF),
    ],
    "normalisation_of_inf": [case(op("layer_norm", input=held(INF, 1.0)))],
    "variance_of_one": [
        case(op("std", self=held(3.0))),
        case(op("var", self=held(3.0, 4.0), params={"correction": 2})),
        case(op("batch_norm", input=held(3.0, 4.0, shape=(1, 2)))),
        back("std", self=held(3.0), result=held(NAN)),
    ],
    "empty_mean": [
        case(op("mean", self=held())),
        case(op("nll_loss", self=held(-0.1, -2.0), target=held(-100.0, -100.0, dtype="int64"))),
        case(op("cross_entropy", input=held(0.1, -2.0))),
    ],
    "exp_overflow": [
        case(op("exp", INF, self=held(1.0, 12.0), dtype="float16")),
        case(op("exp", INF, self=89.0), then=op("divide", self=INF, other=INF)),
    ],
    "sqrt_gradient_at_zero": [
        back("sqrt", INF, result=0.0),
        back("sqrt", NAN, grad=0.0, result=0.0, feeds=("multiply",)),
        back("pow", INF, self=0.0, params={"exponent": 0.5}),
        back("pow", INF, self=0.0, params={"exponent": -0.5}),
        back("std", self=held(1.0, 1.0), result=held(0.0)),
        back("sqrt", INF, result=0.0, params={"of": "sum"}),
    ],
    "norm_gradient_at_zero": [back("vector_norm", self=held(0.0, 0.0), result=held(0.0))],
    "power_gradient_domain": [
        back("pow", INF, self=0.0, params={"exponent": 0.25}),
        back("pow", self=-1.0, exponent=2.0),
    ],
    "log_gradient_at_zero": [back("log", INF, self=0.0), back("log1p", INF, self=-1.0)],
    "inverse_trig_gradient_at_one": [back("acos", -INF, self=1.0)],
    "atan2_origin_gradient": [back("atan2", self=0.0, other=0.0)],
    "cdist_gradient_at_zero": [back("cdist", result=held(0.0, 1.4))],
    "eigen_gradient_degenerate": [
        back("eigh", eigenvalues=held(1.0, 1.0)),
        back("svd", params={"gap": 0.0}),
    ],
    "singular_matrix_gradient": [back("slogdet", A=held(0.0, 0.0, 0.0, 0.0, shape=(2, 2)))],
    "product_gradient_at_zero": [back("cumprod", self=held(0.0, 2.0))],
    "lgamma_gradient_at_pole": [back("lgamma", -INF, self=-2.0)],
    "logit_gradient_at_bound": [back("logit", INF, self=1.0)],
    "slope_overflow": [
        back("divide", -INF, self=1.0, other=1e-30),
        back("sqrt", INF, dtype="float16", grad=6e4, result=2e-3),
    ],
    "exp_gradient_overflow": [back("exp", INF, grad=1e30, result=held(1e20))],
    "optimizer_setting_bad": [
        case(phase="optimizer", gradient=held(0.1), settings={"lr": NAN}),
        case(phase="optimizer", settings={"lr": 0.1, "betas[0]": INF}),
    ],
    "optimizer_state_overflow": [
        case(phase="optimizer", gradient=held(1e30), state={"exp_avg_sq": held(INF)}),
        case(phase="optimizer", tensor=STATE, state={"nu": held(INF)}),
    ],
    "optimizer_epsilon_underflow": [
        case(phase="optimizer", gradient=held(0.0, 1e-5), state={"exp_avg_sq": ZEROS})
    ],
    "optimizer_state_bad": [
        case(phase="optimizer", gradient=held(0.1), state={"momentum_buffer": held(NAN)})
    ],
    "weight_written": [
        case(phase="optimizer", gradient=held(0.1), summary=held(NAN, 0.5)),
        case(phase="optimizer", summary=held(0.5, NAN), state={"exp_avg": held(0.1, 0.1)}),
        case(phase="optimizer", gradient=held(0.1), summary=held(NAN, NAN)),
    ],
    "optimizer_step_too_large": [
        case(phase="optimizer", kind="posinf", gradient=held(1e30)),
        case(phase="optimizer", gradient=held(1e9), settings={"lr": 1e30}, summary=held(INF)),
    ],
    "loss_scale_floor": [
        replace(back("matmul", INF, self=held(3e38), mat2=held(10.0)), scale=1.0),
        case(phase="backward", kind="posinf", scale=0.5),
    ],
    "loss_scale_too_high": [
        replace(back("matmul", INF, self=VEC, mat2=VEC, dtype="float16", wide=9e4), scale=65536.0)
    ],
    "exploding_gradient": [
        replace(back("matmul", INF, self=held(3e38), mat2=held(10.0)), growth=CLIMB),
        case(phase="backward", kind="posinf", growth=CLIMB),
        case(phase="backward", kind="spike", growth=((1, 1.0), (2, 80.0))),
    ],
    "growth_without_training": [
        case(op("matmul", INF, self=held(3e38), mat2=held(10.0)), growth=CLIMB, trained=False),
    ],
    "learning_rate_divergence": [
        case(op("matmul", INF, self=held(3e38), mat2=held(10.0)), growth=CLIMB),
        case(phase="loss", kind="posinf", growth=(*CLIMB, (400, NAN))),
    ],
    "overflow_in_dtype": [
        case(op("matmul", INF, self=held(512.0), mat2=held(300.0), dtype="float16", wide=153600.0)),
        case(op("square", INF, self=2e19, wide=4e38)),
        case(op("sum", INF, self=held(6e4, 6e4, dtype="float16"), dtype="float16", wide=1.2e5)),
        case(op("sum", INF, self=held(2e38, 2e38, 2e38))),
        case(op("astype", INF, self=held(7.1e4), dtype="float16")),
        case(op("multiply", INF, self=3e38, other=10.0)),
        case(op("divide", INF, self=1e10, other=1e-30)),
        case(op("det", INF, A=held(1e30, 1e30))),
        back("matmul", INF, self=held(3e38), mat2=held(10.0)),
        case(op("attention", query=held(500.0), key=held(500.0), dtype="float16")),
    ],
    "beyond_limit": [case(kind="large", summary=held(6e4, dtype="float16"))],
    "vanishing_gradient": [case(phase="backward", kind="vanishing", summary=held(1e-20))],
    "written_constant": [
        case(op("fill", other=Operand("value", held(NAN), NAN, source="constant"))),
        case(op("multiply", self=1.0, other=Operand("other", held(NAN), NAN, source="constant"))),
        case(op("multiply", self=0.0, other=TOO_LARGE, dtype="float16", text="x * 1e5")),
        case(op("add", INF, self=0.0, other=TOO_LARGE, dtype="float16", text="x + 1e5")),
        case(op("multiply", self=0.0, other=held(1e48, dtype="float")), jump="it grew"),
    ],
    "unknown": [
        case(op("frobnicate", self=1.0)),
        case(op("log", self=1.0)),
        back("gelu", self=2.0),
        case(phase="value", summary=held(NAN)),
    ],
}

MISSES: list[tuple[str, Situation]] = [
    ("log_of_zero", case(op("log1p", NAN, self=0.0))),
    ("log_of_zero", back("log", INF, self=0.0)),
    ("log_of_negative", case(op("log", -INF, self=held(-0.0, 0.0)))),
    ("divide_by_zero", case(op("divide", INF, self=1e38, other=1e-10))),
    ("divide_by_zero", case(op("multiply", self=1.0, other=0.0))),
    ("divide_by_zero", case(op("layer_norm", self=held(1.0, INF), params={"eps": 0.0}))),
    (
        "divide_by_zero",
        case(op("batch_norm", self=1.0, running_var=held(1.0), params={"eps": 0.0})),
    ),
    ("sqrt_of_negative", case(op("sqrt", self=-0.0))),
    ("sqrt_of_negative", case(op("batch_norm", self=-1.0, running_var=held(1.0, 1.0)))),
    ("power_domain", case(op("pow", INF, self=-2.0, params={"exponent": 3}))),
    ("epsilon_underflow", case(op("divide", self=0.0, other=0.0, text="x / (y + 1e-8)"))),
    ("epsilon_underflow", case(op("log", -INF, self=0.0, dtype="float16", text="log(x + 1e-4)"))),
    ("epsilon_underflow", case(op("log", -INF, self=0.0, text="log(1 - clip(p, 0, 1 - 1e-6))"))),
    ("cosine_of_zero_vector", case(op("divide", self=0.0, other=0.0, text="x / y"))),
    ("where_gradient_trap", back("sqrt", INF, grad=1.0, result=0.0, feeds=("where",))),
    ("where_gradient_trap", back("sqrt", grad=0.0, result=0.0, feeds=("multiply",))),
    ("where_gradient_trap", case(op("log", -INF, self=0.0))),
    ("where_gradient_trap", case(op("exp", INF, self=200.0), surfaced="backward", then=op("abs"))),
    ("sqrt_gradient_at_zero", back("sqrt", INF, result=0.5)),
    ("sqrt_gradient_at_zero", back("pow", INF, self=0.0, params={"exponent": 0.25})),
    ("norm_gradient_at_zero", back("vector_norm", INF, result=held(1.0))),
    ("inverse_trig_domain", case(op("acos", self=1.0))),
    ("atan2_origin_gradient", back("atan2", self=0.0, other=1.0)),
    ("inf_minus_inf", case(op("subtract", self=INF, other=-INF))),
    ("inf_minus_inf", case(op("add", self=INF, other=-INF, params={"alpha": -1}))),
    ("inf_over_inf", case(op("divide", self=INF, other=1.0))),
    ("zero_times_inf", case(op("multiply", self=2.0, other=INF))),
    ("zero_times_inf", case(op("matmul", self=held(1.0), mat2=held(INF)))),
    (
        "written_constant",
        case(op("multiply", self=0.0, other=TOO_LARGE, dtype="float16", text="x * float('inf')")),
    ),
    ("softmax_fully_masked", case(op("softmax", self=held(1.0, 2.0)))),
    ("softmax_fully_masked", case(op("softmax", self=held(INF, -INF)))),
    ("variance_of_one", case(op("std", self=held(1.0, 2.0)))),
    ("variance_of_one", case(op("var", self=held(1.0), params={"correction": 0}))),
    ("empty_mean", case(op("nll_loss", INF, self=held(-INF, 0.0)))),
    ("empty_mean", case(op("mean", INF, self=held(1.0)))),
    ("exp_overflow", case(op("exp", INF, self=80.0))),
    ("overflow_in_dtype", case(op("matmul", INF, self=held(1.0), mat2=held(1.0)))),
    ("overflow_in_dtype", case(op("sum", INF, self=held(1.0, 2.0)))),
    ("slope_overflow", back("divide", INF, self=1.0, other=0.5)),
    ("exploding_gradient", case(phase="backward", growth=((1, 1.0), (2, 1.1), (3, 1.2)))),
    ("exploding_gradient", case(phase="forward", growth=CLIMB)),
    ("learning_rate_divergence", case(growth=((1, 100.0), (2, 900.0), (3, 9.0), (4, 8.0)))),
    ("learning_rate_divergence", case(op("log", -INF, self=0.0), growth=CLIMB)),
    ("learning_rate_divergence", case(op("gelu", INF, self=INF), growth=CLIMB)),
    ("loss_scale_floor", case(phase="backward", scale=1024.0)),
    ("loss_scale_too_high", replace(back("sqrt", INF, result=0.0), scale=65536.0)),
    ("optimizer_epsilon_underflow", case(phase="optimizer", state={"exp_avg_sq": held(0.0)})),
    ("weight_written", case(phase="optimizer", gradient=held(0.1), summary=held(NAN, INF))),
    ("weight_written", case(phase="optimizer", gradient=held(NAN), summary=held(NAN, 0.5))),
    ("bad_input", outside("input", "mask", -INF)),
    ("bad_label", case(phase="input", summary=BATCH)),
    ("running_statistics_bad", case(phase="parameter", parameter="norm.weight")),
    ("lgamma_pole", case(op("lgamma", INF, self=1e38))),
    ("special_function_domain", case(op("modified_bessel_k1", INF, self=1e-40))),
    ("special_function_domain", case(op("igamma", self=2.0, other=0.0))),
    ("special_function_domain", case(op("zeta", INF, self=1.5, other=1e-38))),
    ("index_out_of_range", case(op("take", self=held(NAN)))),
    ("ctc_target_too_long", case(op("ctc_loss", INF, log_probs=-INF))),
    ("optimizer_setting_bad", case(phase="optimizer", settings={"lr": 1e38, "max_norm": INF})),
    ("growth_without_training", case(growth=CLIMB)),
    ("learning_rate_divergence", case(op("pow", INF, self=held(3e24)), growth=NOISE)),
    (
        "cosine_of_zero_vector",
        case(op("divide", self=0.0, other=0.0, text="w / s  # normalize(w)")),
    ),
]
