"""Functions of libraries over NumPy, each as somebody would call it, with small arguments."""

from collections.abc import Callable
from functools import partial
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
    cluster,
    covariance,
    cross_decomposition,
    datasets,
    decomposition,
    discriminant_analysis,
    ensemble,
    feature_selection,
    gaussian_process,
    impute,
    kernel_ridge,
    linear_model,
    manifold,
    metrics,
    mixture,
    model_selection,
    naive_bayes,
    neighbors,
    neural_network,
    pipeline,
    preprocessing,
    svm,
    tree,
)
from statsmodels.tsa.arima.model import ARIMA
from statsmodels.tsa.stattools import adfuller

CALLS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {}
DRAWN = np.random.default_rng(0)


def call(name: str, function: Callable[..., Any], *args: Any) -> None:
    CALLS[name] = function, args


# scikit-learn: fit and predict, fit and transform, what is above a single estimator

SORTED, CLASS = datasets.make_classification(120, 6, random_state=0)
FEATURES, TARGET = datasets.make_regression(120, 6, random_state=0, noise=1.0)


def seeded(make: Any, *args: Any, **options: Any) -> Any:
    return partial(make, *args, random_state=0, **options)


def predicted(make: Callable[[], Any]) -> Callable[[Any, Any], Any]:
    return lambda x, y: make().fit(x, y).predict(x)


def transformed(make: Callable[[], Any]) -> Callable[[Any, Any], Any]:
    return lambda x, y: make().fit(x, y).transform(x)


CLASSIFIERS = (
    linear_model.LogisticRegression,
    seeded(linear_model.SGDClassifier),
    svm.SVC,
    neighbors.KNeighborsClassifier,
    seeded(tree.DecisionTreeClassifier),
    seeded(ensemble.RandomForestClassifier, 10),
    seeded(ensemble.GradientBoostingClassifier, n_estimators=10),
    seeded(ensemble.HistGradientBoostingClassifier, max_iter=5),
    naive_bayes.GaussianNB,
    discriminant_analysis.LinearDiscriminantAnalysis,
    seeded(neural_network.MLPClassifier, (8,), max_iter=30),
    seeded(gaussian_process.GaussianProcessClassifier),
)
REGRESSORS = (
    linear_model.LinearRegression,
    linear_model.Lasso,
    linear_model.BayesianRidge,
    linear_model.HuberRegressor,
    linear_model.QuantileRegressor,
    linear_model.TweedieRegressor,
    kernel_ridge.KernelRidge,
    cross_decomposition.PLSRegression,
    seeded(gaussian_process.GaussianProcessRegressor),
)
TRANSFORMERS = (
    preprocessing.StandardScaler,
    preprocessing.RobustScaler,
    partial(preprocessing.QuantileTransformer, n_quantiles=50),
    preprocessing.PowerTransformer,
    preprocessing.SplineTransformer,
    partial(preprocessing.KBinsDiscretizer, 3, encode="ordinal"),
    partial(decomposition.PCA, 3),
    partial(decomposition.KernelPCA, 2),
    seeded(decomposition.FastICA, 3),
    partial(feature_selection.SelectKBest, k=3),
    partial(manifold.Isomap, n_components=2),
)


def of_class(make: Any) -> str:
    while isinstance(make, partial):
        make = make.func
    return make.__name__


for make in CLASSIFIERS:
    call(f"sklearn.{of_class(make)}", predicted(make), SORTED, CLASS)
for make in REGRESSORS:
    call(f"sklearn.{of_class(make)}", predicted(make), FEATURES, TARGET)
for make in TRANSFORMERS:
    call(f"sklearn.{of_class(make)}", transformed(make), SORTED, CLASS)
call("sklearn.NMF", lambda x: decomposition.NMF(2, random_state=0).fit_transform(x), abs(SORTED))
call(
    "sklearn.TSNE",
    lambda x: manifold.TSNE(2, random_state=0, max_iter=250).fit_transform(x),
    SORTED[:40],
)
call(
    "sklearn.KMeans", predicted(partial(cluster.KMeans, 3, random_state=0, n_init=1)), SORTED, CLASS
)
call("sklearn.DBSCAN", lambda x: cluster.DBSCAN(1.5).fit_predict(x), SORTED)
call("sklearn.GaussianMixture", predicted(seeded(mixture.GaussianMixture, 2)), SORTED, CLASS)
call("sklearn.LedoitWolf", lambda x: covariance.LedoitWolf().fit(x).covariance_, SORTED)
call(
    "sklearn.KNNImputer",
    lambda x: impute.KNNImputer().fit_transform(np.where(x > 2, np.nan, x)),
    SORTED,
)
call(
    "sklearn.SimpleImputer",
    lambda x: impute.SimpleImputer().fit_transform(np.where(x > 2, np.nan, x)),
    SORTED,
)
call(
    "sklearn.cross_val_score",
    lambda x, y: model_selection.cross_val_score(
        pipeline.make_pipeline(preprocessing.StandardScaler(), linear_model.LogisticRegression()),
        x,
        y,
    ),
    SORTED,
    CLASS,
)
call(
    "sklearn.GridSearchCV",
    lambda x, y: (
        model_selection.GridSearchCV(svm.SVC(), {"C": [0.1, 1]}, cv=2).fit(x, y).best_score_
    ),
    SORTED,
    CLASS,
)
call("sklearn.roc_auc_score", lambda x, y: metrics.roc_auc_score(y, x[:, 0]), SORTED, CLASS)
for metric in (metrics.r2_score, metrics.mean_squared_error):
    call(f"sklearn.{metric.__name__}", metric, SORTED[:, 0], SORTED[:, 1])
for pairwise in (metrics.pairwise_distances, metrics.pairwise.rbf_kernel):
    call(f"sklearn.{pairwise.__name__}", pairwise, SORTED)

# SciPy

X = np.linspace(0.1, 3, 50)
Y = np.sin(X) + 0.01 * DRAWN.normal(size=50)
MATRIX = DRAWN.normal(size=(6, 6))
POSITIVE = MATRIX @ MATRIX.T + np.eye(6)
VECTOR = DRAWN.normal(size=6)
SOUND = DRAWN.normal(size=256)

for name in ("gamma", "gammaln", "erf", "expit", "log1p", "j0", "softmax", "logsumexp", "entr"):
    call(f"scipy.special.{name}", getattr(special, name), X / 4)
for name in ("xlogy", "kl_div", "beta", "jv"):
    call(f"scipy.special.{name}", getattr(special, name), X / 4, X / 4)
call("scipy.special.zeta", lambda x: special.zeta(x + 1), X)
call("scipy.special.mixed", lambda x: special.erf(x) * np.exp(-x) + special.gammaln(x), X)
for name, shape in {"norm": (), "gamma": (2.0,), "t": (3.0,)}.items():
    for what in ("pdf", "logcdf", "sf"):
        of = getattr(getattr(stats, name), what)
        call(f"scipy.stats.{name}.{what}", lambda x, of=of, shape=shape: of(x / 4, *shape), X)
for name in ("ttest_ind", "pearsonr", "spearmanr", "ks_2samp", "linregress"):
    call(f"scipy.stats.{name}", lambda x, y, name=name: tuple(getattr(stats, name)(x, y)), X, Y)
for name in ("skew", "zscore", "iqr", "trim_mean", "gmean", "rankdata", "entropy"):
    more = (0.1,) if name == "trim_mean" else ()
    call(f"scipy.stats.{name}", lambda x, name=name, more=more: getattr(stats, name)(x, *more), X)
call("scipy.stats.norm.fit", lambda y: stats.norm.fit(y), Y)
call("scipy.stats.gaussian_kde", lambda x: stats.gaussian_kde(x)(x), X)
call(
    "scipy.stats.multivariate_normal",
    lambda a, s: stats.multivariate_normal(np.zeros(6), s).logpdf(a),
    MATRIX,
    POSITIVE,
)
call(
    "scipy.stats.bootstrap",
    lambda y: stats.bootstrap((y,), np.mean, n_resamples=99, rng=1).standard_error,
    Y,
)


def rosenbrock(x: Any) -> Any:
    return ((1 - x[:-1]) ** 2 + 100 * (x[1:] - x[:-1] ** 2) ** 2).sum()


for method in ("Nelder-Mead", "BFGS", "L-BFGS-B", "TNC", "COBYLA", "SLSQP", "trust-constr"):
    call(
        f"scipy.minimize.{method}",
        lambda x0, method=method: (
            optimize.minimize(
                rosenbrock,
                x0,
                method=method,
                options={"maxfun" if method == "TNC" else "maxiter": 60},
            ).x
        ),
        np.array([1.3, 0.7, 0.8]),
    )
call(
    "scipy.curve_fit",
    lambda x, y: optimize.curve_fit(lambda x, a, b: a * np.sin(b * x), x, y, p0=[0.9, 1.1])[0],
    X,
    Y,
)
call("scipy.root", lambda x0: optimize.root(lambda z: z**3 - 2, x0).x, np.ones(3))
call("scipy.brentq", lambda a: optimize.brentq(lambda t: (a * t - 1).sum(), -5, 5), np.ones(3))
call(
    "scipy.linprog",
    lambda c: optimize.linprog(c, A_ub=[[1, 1]], b_ub=[1]).x,
    np.array([-1.0, -2.0]),
)
call(
    "scipy.differential_evolution",
    lambda c: (
        optimize.differential_evolution(
            lambda p: ((p - c) ** 2).sum(), [(-2, 2)] * 2, rng=0, maxiter=20
        ).x
    ),
    np.array([0.3, 0.4]),
)
call("scipy.quad", lambda c: integrate.quad(lambda t: float((c * t).sum()), 0, 1), np.ones(2))
call("scipy.trapezoid", integrate.trapezoid, Y, X)
for method in ("RK45", "BDF", "LSODA"):
    call(
        f"scipy.solve_ivp.{method}",
        lambda y0, method=method: (
            integrate.solve_ivp(lambda t, y: np.array([y[1], -y[0]]), (0, 3), y0, method=method).y
        ),
        np.array([1.0, 0.0]),
    )
call("scipy.odeint", lambda y0, t: integrate.odeint(lambda y, t: -y, y0, t), np.array([1.0]), X)

TAPS = signal.butter(4, 0.2)
call("scipy.signal.lfilter", lambda s: signal.lfilter(*TAPS, s), SOUND)
call("scipy.signal.filtfilt", lambda s: signal.filtfilt(*TAPS, s), SOUND)
for name in ("welch", "periodogram", "hilbert", "detrend", "find_peaks", "medfilt"):
    call(f"scipy.signal.{name}", getattr(signal, name), SOUND)
call("scipy.signal.stft", lambda s: signal.stft(s, nperseg=64), SOUND)
call("scipy.signal.convolve", lambda s: signal.convolve(s, np.ones(5)), SOUND)
call("scipy.signal.resample", lambda s: signal.resample(s, 100), SOUND)
for name in ("inv", "det", "lu", "qr", "svd", "eigh", "cholesky", "expm", "logm", "pinv"):
    call(f"scipy.linalg.{name}", getattr(linalg, name), POSITIVE)
call("scipy.linalg.solve", linalg.solve, POSITIVE, VECTOR)
call("scipy.linalg.lstsq", lambda a, b: linalg.lstsq(a, b)[0], POSITIVE, VECTOR)
call("scipy.interpolate.CubicSpline", lambda x, y: interpolate.CubicSpline(x, y)(x), X, Y)
call(
    "scipy.interpolate.RegularGrid",
    lambda a: interpolate.RegularGridInterpolator((np.arange(6.0),) * 2, a)([[1.5, 2.5]]),
    MATRIX,
)
call("scipy.interpolate.splrep", lambda x, y: interpolate.splev(x, interpolate.splrep(x, y)), X, Y)
call("scipy.ndimage.gaussian_filter", lambda a: ndimage.gaussian_filter(a, 1), MATRIX)
call("scipy.ndimage.zoom", lambda a: ndimage.zoom(a, 2), MATRIX)
call("scipy.sparse.csr_array", lambda a, b: sparse.csr_array(a) @ b, MATRIX, VECTOR)
call("scipy.sparse.constant", lambda b: sparse.csr_array(np.eye(6)) @ b, VECTOR)
call(
    "scipy.sparse.spsolve",
    lambda a, b: sparse_linalg.spsolve(sparse.csc_array(a), b),
    POSITIVE,
    VECTOR,
)
call("scipy.sparse.cg", lambda a, b: sparse_linalg.cg(a, b)[0], POSITIVE, VECTOR)
call("scipy.sparse.gmres", lambda a, b: sparse_linalg.gmres(a, b)[0], POSITIVE, VECTOR)
call(
    "scipy.sparse.LinearOperator",
    lambda a, b: sparse_linalg.cg(
        sparse_linalg.LinearOperator((6, 6), matvec=lambda v: a @ v, dtype=float), b
    )[0],
    POSITIVE,
    VECTOR,
)
call("scipy.sparse.eigsh", lambda a: sparse_linalg.eigsh(a, 2, v0=np.ones(6))[0], POSITIVE)
call("scipy.sparse.expm_multiply", sparse_linalg.expm_multiply, MATRIX, VECTOR)
call("scipy.spatial.cdist", lambda a: spatial.distance.cdist(a, a), MATRIX)
call("scipy.spatial.KDTree", lambda a: spatial.KDTree(a).query(a, 2)[0], MATRIX)
call(
    "scipy.spatial.Rotation",
    lambda q: spatial.transform.Rotation.from_quat(q).as_matrix(),
    np.array([0, 0, 0.7, 0.7]),
)
call("scipy.cluster.linkage", scipy.cluster.hierarchy.linkage, MATRIX)
for name in ("fft", "rfft", "dct", "dst"):
    call(f"scipy.fft.{name}", getattr(fft, name), SOUND)

# statsmodels, pandas, xarray

DESIGN = sm.add_constant(DRAWN.normal(size=(80, 3)))
LINEAR = DESIGN @ np.array([1, 0.5, -1, 2.0]) + 0.1 * DRAWN.normal(size=80)
BINARY = (DRAWN.random(80) < 0.5).astype(float)
COUNTS = DRAWN.poisson(2, 80).astype(float)
WALK = np.cumsum(DRAWN.normal(size=120))
call("statsmodels.OLS", lambda x, y: sm.OLS(y, x).fit().params, DESIGN, LINEAR)
call("statsmodels.RLM", lambda x, y: sm.RLM(y, x).fit().params, DESIGN, LINEAR)
call(
    "statsmodels.GLM.binomial",
    lambda x, y: sm.GLM(y, x, family=sm.families.Binomial()).fit().params,
    DESIGN,
    BINARY,
)
call("statsmodels.Logit", lambda x, y: sm.Logit(y, x).fit(disp=0).params, DESIGN, BINARY)
call("statsmodels.ARIMA", lambda t: ARIMA(t, order=(1, 1, 1)).fit().params, WALK)
call("statsmodels.adfuller", lambda t: tuple(adfuller(t))[:2], WALK)
call("statsmodels.lowess", lambda x, y: sm.nonparametric.lowess(y, x), DESIGN[:, 1], LINEAR)
call(
    "statsmodels.residual",
    lambda x, y: np.sqrt(((y - x @ sm.OLS(y, x).fit().params) ** 2).mean()),
    DESIGN,
    LINEAR,
)

FRAME = pd.DataFrame(DESIGN[:, 1:], columns=list("abc"))
ONES = pd.Series(np.ones(80))
call("pandas.frame", lambda d: (d.a / d.b).to_numpy(), FRAME)
call("pandas.frame.describe", lambda d: d.describe(), FRAME)
call("pandas.DataFrame", lambda x: pd.DataFrame(x).mean().to_numpy(), DESIGN)
call("pandas.rolling", lambda y: (pd.Series(y) * 2).rolling(3).mean().to_numpy()[2:], LINEAR)
call(
    "pandas.groupby",
    lambda x: pd.DataFrame({"v": x[:, 1], "g": np.arange(80) % 3}).groupby("g").v.std().to_numpy(),
    DESIGN,
)
call("pandas.series_times_array", lambda y: (ONES * y).to_numpy(), LINEAR)
call("pandas.array_times_series", lambda y: np.asarray(y * ONES), LINEAR)
call("pandas.result", lambda y: pd.DataFrame({"y": y, "z": np.log(np.abs(y))}), LINEAR)
call(
    "pandas.assign", lambda y: pd.DataFrame({"a": np.ones(80)}).assign(b=y).sum().to_numpy(), LINEAR
)
call("pandas.Index", lambda y: pd.Index(y).get_indexer(y), LINEAR)
call("pandas.corr", lambda x: pd.DataFrame(x[:, 1:]).corr().to_numpy(), DESIGN)

GRID = xr.DataArray(DESIGN[:, 1:], dims=("t", "k"))
call("xarray.argument", lambda d: d.mean("t").to_numpy(), GRID)
call("xarray.DataArray", lambda x: xr.DataArray(x, dims=("t", "k")).mean("t").to_numpy(), DESIGN)
call("xarray.result", lambda x: xr.DataArray(x, dims=("t", "k")) * 2, DESIGN)
call("xarray.with_array", lambda x: (GRID * x[:, 1:]).sum().item(), DESIGN)
