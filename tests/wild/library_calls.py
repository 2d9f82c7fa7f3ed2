"""Functions of libraries over NumPy, each as somebody would call it, with small arguments."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import scipy.cluster.hierarchy
import statsmodels.api as sm
import xarray as xr
from scipy import (
    fft,
    integrate,
    interpolate,
    linalg,
    ndimage,
    optimize,
    signal,
    sparse,
    spatial,
    special,
    stats,
)
from scipy.sparse import linalg as sparse_linalg
from sklearn import (
    base,
    datasets,
    decomposition,
    ensemble,
    gaussian_process,
    impute,
    linear_model,
    metrics,
    model_selection,
    neighbors,
    preprocessing,
    svm,
)
from statsmodels.tsa.arima.model import ARIMA

CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
DRAWN = np.random.default_rng(0)


def call(name: str, function: Callable[..., Any], *args: Any) -> None:
    CALLS[name] = function, args


# scikit-learn: fit and predict, fit and transform, what is above a single estimator

SORTED, CLASS = datasets.make_classification(120, 6, random_state=0)
FEATURES, TARGET = datasets.make_regression(120, 6, random_state=0, noise=1.0)


def predicted(estimator: Any) -> Callable[[Any, Any], Any]:
    return lambda x, y: base.clone(estimator).fit(x, y).predict(x)


def transformed(estimator: Any) -> Callable[[Any], Any]:
    return lambda x: base.clone(estimator).fit_transform(x)


for estimator in (
    linear_model.LogisticRegression(),
    svm.SVC(),
    neighbors.KNeighborsClassifier(),
    ensemble.RandomForestClassifier(10, random_state=0),
    ensemble.HistGradientBoostingClassifier(max_iter=5, random_state=0),
    gaussian_process.GaussianProcessClassifier(random_state=0),
):
    call(f"sklearn.{type(estimator).__name__}", predicted(estimator), SORTED, CLASS)
for estimator in (
    linear_model.Lasso(),
    linear_model.HuberRegressor(),
    linear_model.TweedieRegressor(),
):
    call(f"sklearn.{type(estimator).__name__}", predicted(estimator), FEATURES, TARGET)
for estimator in (
    preprocessing.StandardScaler(),
    preprocessing.PowerTransformer(),
    preprocessing.SplineTransformer(),
    decomposition.KernelPCA(2),
):
    call(f"sklearn.{type(estimator).__name__}", transformed(estimator), SORTED)
for estimator in (impute.KNNImputer(), impute.SimpleImputer()):
    fit = transformed(estimator)
    name = f"sklearn.{type(estimator).__name__}"
    call(name, lambda x, fit=fit: fit(np.where(x > 2, np.nan, x)), SORTED)
SEARCH = model_selection.GridSearchCV(svm.SVC(), {"C": [0.1, 1]}, cv=2)
call(
    "sklearn.GridSearchCV",
    lambda x, y: base.clone(SEARCH).fit(x, y).best_score_,
    SORTED,
    CLASS,
)
call("sklearn.roc_auc_score", lambda x, y: metrics.roc_auc_score(y, x[:, 0]), SORTED, CLASS)
call("sklearn.pairwise_distances", metrics.pairwise_distances, SORTED)

# SciPy

X = np.linspace(0.1, 3, 50)
Y = np.sin(X) + 0.01 * DRAWN.normal(size=50)
MATRIX = DRAWN.normal(size=(6, 6))
POSITIVE = MATRIX @ MATRIX.T + np.eye(6)
VECTOR = DRAWN.normal(size=6)
SOUND = DRAWN.normal(size=256)

for name in ("gammaln", "softmax", "logsumexp"):
    call(f"scipy.special.{name}", getattr(special, name), X / 4)
call("scipy.special.xlogy", special.xlogy, X / 4, X / 4)
call("scipy.special.mixed", lambda x: special.erf(x) * np.exp(-x) + special.gammaln(x), X)
call("scipy.stats.norm.logcdf", lambda x: stats.norm.logcdf(x / 4), X)
call("scipy.stats.gamma.pdf", lambda x: stats.gamma.pdf(x / 4, 2.0), X)
call("scipy.stats.ttest_ind", lambda x, y: tuple(stats.ttest_ind(x, y)), X, Y)
call("scipy.stats.rankdata", stats.rankdata, X)
call("scipy.stats.norm.fit", lambda y: stats.norm.fit(y), Y)
call("scipy.stats.gaussian_kde", lambda x: stats.gaussian_kde(x)(x), X)


def rosenbrock(x: Any) -> Any:
    return ((1 - x[:-1]) ** 2 + 100 * (x[1:] - x[:-1] ** 2) ** 2).sum()


for method in ("BFGS", "L-BFGS-B", "SLSQP"):
    made = {"method": method, "options": {"maxiter": 60}}
    call(
        f"scipy.minimize.{method}",
        lambda x0, made=made: optimize.minimize(rosenbrock, x0, **made).x,
        np.array([1.3, 0.7, 0.8]),
    )
call(
    "scipy.curve_fit",
    lambda x, y: optimize.curve_fit(lambda x, a, b: a * np.sin(b * x), x, y, p0=[0.9, 1.1])[0],
    X,
    Y,
)
call("scipy.brentq", lambda a: optimize.brentq(lambda t: (a * t - 1).sum(), -5, 5), np.ones(3))
call("scipy.quad", lambda c: integrate.quad(lambda t: float((c * t).sum()), 0, 1), np.ones(2))
for method in ("RK45", "LSODA"):
    call(
        f"scipy.solve_ivp.{method}",
        lambda y0, method=method: (
            integrate.solve_ivp(lambda t, y: np.array([y[1], -y[0]]), (0, 3), y0, method=method).y
        ),
        np.array([1.0, 0.0]),
    )
call("scipy.signal.lfilter", lambda s: signal.lfilter(*signal.butter(4, 0.2), s), SOUND)
for name in ("welch", "periodogram", "hilbert"):
    call(f"scipy.signal.{name}", getattr(signal, name), SOUND)
for name in ("inv", "svd", "cholesky", "expm"):
    call(f"scipy.linalg.{name}", getattr(linalg, name), POSITIVE)
call("scipy.linalg.solve", linalg.solve, POSITIVE, VECTOR)
call("scipy.interpolate.CubicSpline", lambda x, y: interpolate.CubicSpline(x, y)(x), X, Y)
call("scipy.ndimage.gaussian_filter", lambda a: ndimage.gaussian_filter(a, 1), MATRIX)
call("scipy.sparse.csr_array", lambda a, b: sparse.csr_array(a) @ b, MATRIX, VECTOR)
call("scipy.sparse.cg", lambda a, b: sparse_linalg.cg(a, b)[0], POSITIVE, VECTOR)
call("scipy.sparse.eigsh", lambda a: sparse_linalg.eigsh(a, 2, v0=np.ones(6))[0], POSITIVE)
call("scipy.spatial.KDTree", lambda a: spatial.KDTree(a).query(a, 2)[0], MATRIX)
call("scipy.cluster.linkage", scipy.cluster.hierarchy.linkage, MATRIX)
call("scipy.fft.rfft", fft.rfft, SOUND)

# statsmodels, pandas, xarray

DESIGN = sm.add_constant(DRAWN.normal(size=(80, 3)))
LINEAR = DESIGN @ np.array([1, 0.5, -1, 2.0]) + 0.1 * DRAWN.normal(size=80)
BINARY = (DRAWN.random(80) < 0.5).astype(float)
WALK = np.cumsum(DRAWN.normal(size=120))
call("statsmodels.OLS", lambda x, y: sm.OLS(y, x).fit().params, DESIGN, LINEAR)
call("statsmodels.Logit", lambda x, y: sm.Logit(y, x).fit(disp=0).params, DESIGN, BINARY)
call("statsmodels.ARIMA", lambda t: ARIMA(t, order=(1, 1, 1)).fit().params, WALK)

FRAME = pd.DataFrame(DESIGN[:, 1:], columns=list("abc"))
ONES = pd.Series(np.ones(80))
call("pandas.frame", lambda d: (d.a / d.b).to_numpy(), FRAME)
call("pandas.frame.describe", lambda d: d.describe(), FRAME)
call("pandas.DataFrame", lambda x: pd.DataFrame(x).mean().to_numpy(), DESIGN)
call(
    "pandas.groupby",
    lambda x: pd.DataFrame({"v": x[:, 1], "g": np.arange(80) % 3}).groupby("g").v.std().to_numpy(),
    DESIGN,
)
call("pandas.series_times_array", lambda y: (ONES * y).to_numpy(), LINEAR)
call("pandas.array_times_series", lambda y: np.asarray(y * ONES), LINEAR)
call("pandas.result", lambda y: pd.DataFrame({"y": y, "z": np.log(np.abs(y))}), LINEAR)

GRID = xr.DataArray(DESIGN[:, 1:], dims=("t", "k"))
call("xarray.argument", lambda d: d.mean("t").to_numpy(), GRID)
call("xarray.DataArray", lambda x: xr.DataArray(x, dims=("t", "k")).mean("t").to_numpy(), DESIGN)
call("xarray.result", lambda x: xr.DataArray(x, dims=("t", "k")) * 2, DESIGN)
