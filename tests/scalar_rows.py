"""Functions and inputs for the tests of scalar programs, and what a scalar program must fulfil."""

from collections.abc import Callable
from functools import partial
from typing import Any

import diffrax
import equinox.internal as eqxi
import jax
import jax.extend.core
import jax.numpy as jnp
import lineax as lx
import numpy as np

from gradsolve_backend.kernels.scalar import ScalarProgram, scalarise

Row = tuple[str, Callable[..., Any], tuple[Any, ...]]

RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape)


def program_of(function: Callable[..., Any], *inputs: Any, **options: Any) -> ScalarProgram:
    return scalarise(jax.make_jaxpr(function)(*inputs), **options)


def run(program: ScalarProgram, *inputs: Any) -> list[jax.Array]:
    closed = program.jaxpr
    return program.implode(jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *program.explode(*jax.tree.leaves(inputs))))


def assert_scalar(program: ScalarProgram) -> None:
    """Rank 0 everywhere, but for tables and the one-element rows read from them."""
    tables = set()
    scalars = iter(program.jaxpr.jaxpr.invars)
    for aval, whole in zip(program.in_avals, program.tables, strict=True):
        count = 1 if whole else int(np.prod(aval.shape))
        taken = [next(scalars) for _ in range(count)]
        assert all(v.aval.ndim == int(whole) for v in taken)
        tables.update(taken if whole else [])
    assert program.equations == assert_equations(program.jaxpr.jaxpr, tables)


def assert_equations(jaxpr: Any, tables: set[Any]) -> int:
    """Rank 0 everywhere, but for these tables and constants, and for loops; returns the number of equations."""
    tables, rows, count = {*tables, *jaxpr.constvars}, set(), len(jaxpr.eqns)
    for equation in jaxpr.eqns:
        name, ranks = equation.primitive.name, [v.aval.ndim for v in equation.outvars]
        if name == "while":
            for part in ("cond", "body"):
                inner = equation.params[f"{part}_jaxpr"].jaxpr
                count += assert_equations(inner, {v for v in inner.invars if v.aval.ndim == 1})
            assert ranks == [0] * len(ranks) and all(v.aval.ndim == 0 or v in tables for v in equation.invars)
            continue
        assert not any(isinstance(value, jax.extend.core.Jaxpr) for value in equation.params.values()), name
        if name == "dynamic_slice":
            assert equation.invars[0] in tables and equation.invars[1].aval.ndim == 0
            assert equation.outvars[0].aval.shape == (1,)
            rows.add(equation.outvars[0])
        else:
            assert ranks == [0] * len(ranks), name
            assert all(v.aval.ndim == 0 or (name == "squeeze" and v in rows) for v in equation.invars), name
    return count


def assert_same(function: Callable[..., Any], inputs: tuple[Any, ...], rtol: float = 1e-13) -> ScalarProgram:
    closed = jax.make_jaxpr(function)(*inputs)
    program = scalarise(closed)
    assert_scalar(program)
    arrays = map(jnp.asarray, jax.tree.leaves(inputs))
    expected = [jnp.asarray(x) for x in jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *arrays)]
    got = run(program, *inputs)
    assert [(g.shape, g.dtype) for g in got] == [(e.shape, e.dtype) for e in expected]
    inexact = [e for e in expected if jnp.issubdtype(e.dtype, jnp.inexact)]
    scale = max((abs(x) for e in inexact for x in np.ravel(e).tolist() if np.isfinite(x)), default=0.0)
    for g, e in zip(got, expected, strict=True):
        eps = 8 * float(jnp.finfo(e.dtype).eps) if jnp.issubdtype(e.dtype, jnp.inexact) else 0.0
        tolerance = max(rtol, eps) if eps else 0.0
        # error estimates cancel: what is left is round-off of the largest output
        np.testing.assert_allclose(np.asarray(g), np.asarray(e), rtol=tolerance, atol=tolerance * scale)
    return program


def seeds(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.cos(jnp.arange(jnp.size(x), dtype=x.dtype)).reshape(jnp.shape(x)), tree)


def tangents_of(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *inputs: jax.jvp(function, inputs, seeds(inputs))


def cotangents_of(function: Callable[..., Any]) -> Callable[..., Any]:
    def pull(*inputs: Any) -> Any:
        out, back = jax.vjp(function, *inputs)
        return back(seeds(out))

    return pull


def names(rows: Any) -> list[str]:
    return [row[0] for row in rows]


# ---- rows: name, function, inputs ------------------------------------------------------------------

VECTOR, MATRIX, SQUARE = normal(5), normal(3, 4), normal(4, 4)
UNIT = np.linspace(-0.9, 0.9, 5)
INTS, WORDS = np.array([-7, -2, 0, 3, 11]), np.array([0, 1, 5, 2**31, 2**32 - 1], np.uint32)
FLAGS = np.array([True, False, True])
FORCING_T, FORCING_U = np.sort(normal(300)), normal(300)
TIMES = np.linspace(0.0, 2.0, 12)
EXTREMES = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.5, -2.5])

UNARY: list[Row] = [
    (f.__name__, f, (UNIT,))
    for f in (jnp.sin, jnp.cos, jnp.tan, jnp.arcsin, jnp.arccos, jnp.arctan, jnp.sinh, jnp.cosh, jnp.tanh, jnp.arcsinh)
    + (jnp.arctanh, jnp.exp, jnp.exp2, jnp.expm1, jnp.log1p, jnp.square, jnp.cbrt, jax.nn.sigmoid, jax.nn.relu)
    + (jax.nn.softplus, jax.nn.gelu, jax.scipy.special.erf, jax.scipy.special.erfc, jax.scipy.special.erfinv)
    + (jnp.abs, jnp.sign, jnp.floor, jnp.ceil, jnp.round, jnp.isfinite, jnp.negative, jnp.reciprocal, jnp.sinc)
] + [
    ("log", lambda x: (jnp.log(x * x), jnp.sqrt(x * x), jax.lax.rsqrt(x * x), jnp.log2(x * x)), (UNIT,)),
    ("lgamma", lambda x: (jax.lax.lgamma(x * x), jax.lax.digamma(x * x)), (UNIT,)),
    ("acosh", lambda x: jnp.arccosh(2.0 + x), (UNIT,)),
    ("extremes", lambda x: (x + 1.0, jnp.isnan(x), jnp.sign(x), jnp.isfinite(x), jnp.nan_to_num(x)), (EXTREMES,)),
]

BINARY: list[Row] = [
    ("arithmetic", lambda x, y: (x + y, x - y, x * y, x / y, x**y), (jnp.abs(VECTOR), UNIT)),
    ("integer_pow", lambda x: (x**3, x**-2, x**0, x**1), (VECTOR,)),
    ("rem", lambda x, y: (jax.lax.rem(x, y), jnp.mod(x, y), jnp.floor_divide(x, y)), (VECTOR, UNIT)),
    ("int_division", lambda x: (x // 3, x % 3, jax.lax.div(x, jnp.full_like(x, -4)), x**2), (INTS,)),
    ("atan2", jnp.arctan2, (VECTOR, UNIT)),
    ("extremum", lambda x, y: (jnp.maximum(x, y), jnp.minimum(x, y), jnp.hypot(x, y)), (VECTOR, UNIT)),
    ("compare", lambda x, y: (x < y, x <= y, x > y, x >= y, x == y, x != y), (VECTOR, UNIT)),
    ("logical", lambda p: (~p, p & p[::-1], p | p[::-1], p ^ p[::-1]), (FLAGS,)),
    ("bits", lambda u: (u & 7, u | 8, u ^ 15, ~u, u << 3, u >> 2, jax.lax.population_count(u)), (WORDS,)),
    ("shift_signed", lambda i: (i >> 1, jax.lax.shift_right_logical(i, jnp.ones_like(i)), i << 2), (INTS,)),
    ("bitcast", lambda x: jax.lax.bitcast_convert_type(x, jnp.uint64) >> 52, (VECTOR,)),
    ("nextafter", lambda x: (jnp.nextafter(x, 2.0), eqxi.nextafter(x), eqxi.prevbefore(x)), (VECTOR,)),
    ("clamp", lambda x: (jnp.clip(x, -0.5, 0.5), jax.lax.clamp(-0.1, x, 0.2)), (VECTOR,)),
    ("where", lambda x: jnp.where(x > 0, x, -3.0 * x), (VECTOR,)),
    ("select_scalar_predicate", lambda x: jax.lax.select(x[0] > 0, x, 2 * x), (VECTOR,)),
    ("convert", lambda x: (x.astype(jnp.int32), x.astype(jnp.float32), x > 0, (x > 0).astype(x.dtype)), (VECTOR,)),
    ("float32", lambda x, y: (x * y, jnp.sum(x), x.astype(jnp.float64)), (np.float32([1, 2]), np.float32([0.3, 4]))),
    ("constants", lambda x: x + jnp.arange(5.0) * jnp.sqrt(jnp.arange(5.0)) - jnp.eye(5)[2], (VECTOR,)),
    ("constant_output", lambda x: (jnp.zeros(3), jnp.arange(4), 2.0, x), (VECTOR,)),
    ("stop_gradient", lambda x: jax.lax.stop_gradient(x) * x, (VECTOR,)),
]

STRUCTURE: list[Row] = [
    ("reshape", lambda x: (x.reshape(4, 3), x.ravel(), x.T.reshape(-1), jnp.ravel(x, order="F")), (MATRIX,)),
    ("slice", lambda x: (x[1:], x[::2, 1], x[::-1], x[:, -1], x[1, 2], x[..., None], x[2:2]), (MATRIX,)),
    ("stack", lambda x, y: (jnp.stack([x, y]), jnp.concatenate([y, x]), jnp.stack([x, y], 1)), (VECTOR, UNIT)),
    ("mixed_stack", lambda x: jnp.stack([x, jnp.ones(5), 2 * x]), (VECTOR,)),
    ("split", lambda x: (jnp.split(x, [2, 3]), jnp.array_split(x, 2), list(x)), (VECTOR,)),
    ("pad", lambda x: (jnp.pad(x, 2), jax.lax.pad(x, 7.0, [(1, -2, 1)])), (VECTOR,)),
    ("pad_negative", lambda x: jax.lax.pad(x, 0.0, [(-1, 1, 0), (2, -1, 2)]), (MATRIX,)),
    ("roll", lambda x: (jnp.roll(x, 2), jnp.roll(x, -1)), (VECTOR,)),
    ("roll_traced", lambda x, k: jnp.roll(x, k), (VECTOR, 3)),
    ("tile", lambda x: (jnp.tile(x, 2), jnp.tile(x, (2, 3)), jnp.repeat(x, 2)), (VECTOR,)),
    ("transpose", lambda x: (x.T, jnp.moveaxis(x[None], 0, 2), jnp.swapaxes(x, 0, 1)), (MATRIX,)),
    ("broadcast", lambda x: (jnp.broadcast_to(x, (2, 5)), jnp.outer(x, x), x[:, None] - x[None, :]), (VECTOR,)),
    ("triangle", lambda x: (jnp.tril(x), jnp.diag(x), jnp.trace(x), jnp.diag(x[0])), (SQUARE,)),
    (
        "empty",
        lambda x: (x[:0], jnp.sum(x[:0]), x[:0] * 2, jnp.zeros((0, 3)), x[:0, None] @ jnp.ones((1, 2))),
        (VECTOR,),
    ),
    ("empty_input", lambda x, y: (x * 2.0, y + jnp.sum(x)), (np.zeros((0, 2)), VECTOR)),
    ("meshgrid", lambda x: jnp.meshgrid(x, jnp.arange(3.0)), (VECTOR,)),
    ("identities", lambda x: eqxi.nondifferentiable_backward(eqxi.nonbatchable(jnp.copy(x))), (VECTOR,)),
    ("select_if_vmap", lambda p, x: eqxi.select_if_vmap_p.bind(p, x, 2 * x), (np.array(True), VECTOR)),
    ("barrier", lambda x: jax.lax.optimization_barrier((x, 2 * x)), (VECTOR,)),
]

REDUCTIONS: list[Row] = [
    ("sums", lambda x: (x.sum(), x.sum(0), x.sum(1, keepdims=True), x.mean(), x.var(), x.std(0)), (MATRIX,)),
    ("prod", lambda x: (x.prod(), x.prod(1)), (MATRIX,)),
    ("extrema", lambda x: (x.max(), x.min(0), jnp.argmax(x), jnp.argmin(x, 1), jnp.ptp(x)), (MATRIX,)),
    ("argmax_nan", lambda x: (jnp.argmax(x), jnp.argmin(x), jnp.nanmax(x)), (EXTREMES[1:],)),
    ("argmax_tie", lambda i: (jnp.argmax(i), jnp.argmin(i)), (np.array([2, 7, 7, 2]),)),
    ("any_all", lambda p: (p.any(), p.all(), jnp.any(p[:0]), jnp.all(p[:0]), jnp.logical_xor.reduce(p)), (FLAGS,)),
    ("cumulative", lambda x: (jnp.cumsum(x), jnp.cumprod(x), jnp.cumsum(x[::-1])), (VECTOR,)),
    ("cumulative_axis", lambda x: (jnp.cumsum(x, 1), jax.lax.cumsum(x, 0, reverse=True)), (MATRIX,)),
    ("cumulative_extrema", lambda x: (jax.lax.cummax(x), jax.lax.cummin(x, reverse=True)), (VECTOR,)),
    ("norms", lambda x: (jnp.linalg.norm(x), jax.nn.softmax(x), jax.nn.logsumexp(x)), (VECTOR,)),
    ("int_sum", lambda i: (i.sum(), i.prod(), i.max(), jnp.cumsum(i)), (INTS,)),
    ("unvmap", lambda p: (eqxi.unvmap_any(p), eqxi.unvmap_all(p), eqxi.unvmap_max(INTS * p.sum())), (FLAGS,)),
]

CONTRACTIONS: list[Row] = [
    ("matmul", lambda a, x: (a @ x, x @ a.T, a @ a.T), (MATRIX, normal(4))),
    ("dot", lambda x: (x @ x, jnp.dot(x, jnp.arange(5.0)), jnp.vdot(x, x)), (VECTOR,)),
    ("einsum", lambda a: (jnp.einsum("ij,kj->ik", a, a), jnp.einsum("ij->j", a), jnp.einsum("ij,ij", a, a)), (MATRIX,)),
    ("batched", lambda a: jnp.einsum("bij,bjk->bki", a, 2 * a), (normal(2, 3, 3),)),
    ("constant_matrix", lambda x: np.array([[0.0, 1.0], [0.5, 0.0]]) @ x, (normal(2),)),
    ("int_matmul", lambda i: jnp.outer(i, i) @ i, (INTS,)),
    ("preferred_type", lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float64), (np.float32([1, 2, 3]),)),
    ("cross", lambda x, y: jnp.cross(x, y), (normal(3), normal(3))),
    (
        "convolve",
        lambda x, y: (jnp.convolve(x, y, "same"), jnp.convolve(x, jnp.array([1.0, -2.0, 1.0]))),
        (VECTOR, UNIT[:3]),
    ),
    (
        "conv_general",
        lambda x, k: jax.lax.conv_general_dilated(
            x, k, (2, 1), [(1, 2), (0, 1)], (1, 2), (2, 1), ("NHWC", "HWIO", "NCHW"), feature_group_count=2
        ),
        (normal(2, 5, 4, 4), normal(2, 3, 2, 6)),
    ),
    ("kron", lambda x: jnp.kron(x, x[:2]), (VECTOR,)),
]

GATHERS: list[Row] = [
    ("fixed_gather", lambda x: (x[np.array([3, 0, 0])], jnp.take(x, np.array([1, 2])), x[np.array([-1])]), (VECTOR,)),
    ("grid_gather", lambda x: x[np.array([0, 2])[:, None], np.array([1, 3])[None, :]], (MATRIX,)),
    ("row_gather", lambda x: (x[np.array([2, 0])], x[:, np.array([3, 3, 0])]), (MATRIX,)),
    ("mask", lambda x: x[np.array([True, False, True, True, False])], (VECTOR,)),
    ("traced", lambda x, i: (x[i], jnp.sin(x)[i], x[::-1][i], jnp.arange(5.0)[i]), (VECTOR, 2)),
    ("traced_negative", lambda x, i: (x[i], (2 * x)[i]), (VECTOR, -2)),
    ("traced_outside", lambda x, i: (x[i], x.at[i].get(mode="clip"), x.at[i].get(mode="fill")), (VECTOR, 9)),
    ("fill_value", lambda x, i: (2 * x).at[i].get(mode="fill", fill_value=-1.0), (VECTOR, 5)),
    ("fill_int", lambda x, i: (x.at[i].get(mode="fill"), (x > 0).at[i].get(mode="fill")), (INTS, 5)),
    ("traced_rows", lambda x, i: (x[i], x[:, i], (2 * x)[i], (2 * x)[i, 1]), (MATRIX, 1)),
    ("traced_pair", lambda x, i, j: (x[i, j], (2 * x)[i, j], x.T[i, j]), (MATRIX, 1, 2)),
    ("traced_many", lambda x, i: (jnp.take(x, i, axis=0), (x * x)[i]), (VECTOR, np.array([[0, 4], [2, 9]]))),
    ("dynamic_slice", lambda x, i: jax.lax.dynamic_slice(x, (i, 1), (2, 2)), (MATRIX, 1)),
    ("dynamic_slice_outside", lambda x, i: jax.lax.dynamic_slice(2 * x, (i, i), (2, 3)), (MATRIX, 7)),
    ("small_index", lambda x, i: (x[i], (2 * x)[i]), (VECTOR, np.int8(-1))),
    ("unsigned_index", lambda x, i: (x[i], (2 * x)[i]), (VECTOR, np.uint32(3))),
    ("vmapped_window", jax.vmap(lambda r, k: jax.lax.dynamic_slice(2 * r, (k,), (2,))), (MATRIX, np.array([9, 0, 2]))),
    ("mixed_index", lambda x, i: x[jnp.stack([i, 3])[1]] + x[jnp.stack([i, 3])], (VECTOR, 1)),
    ("take_along", lambda x: jnp.take_along_axis(x, jnp.argmax(x, 1, keepdims=True), 1), (MATRIX,)),
    ("vmapped_gather", lambda x, i: jax.vmap(lambda r, k: r[k])(x, i), (MATRIX, np.array([3, 0, 2]))),
    ("long_constant", lambda i: jnp.asarray(FORCING_U)[i] + jnp.asarray(FORCING_U[:240]).reshape(80, 3)[i, 1], (17,)),
    ("irregular_table", lambda x, i: jnp.concatenate([x, x[::3]])[i], (FORCING_U, 310)),
    ("scaled_table", lambda x, i: (2.0 * x - 1.0)[i], (FORCING_U, 123)),
    ("table_outside", lambda x, i: (x[:, 1][i], x[:5, 0][i], x[1, i], x[i]), (FORCING_U.reshape(100, 3), 200)),
    (
        "table_below",
        lambda x, i: (x[5:, 1][i], jax.lax.dynamic_slice(x, (i, 1), (2, 1))),
        (FORCING_U.reshape(100, 3), -120),
    ),
    ("column_table", lambda x, i: (x[:, 1][i], x[i], x[1:, 0][i]), (FORCING_U.reshape(100, 3), 42)),
]

SCATTERS: list[Row] = [
    ("fixed_set", lambda x: (x.at[1].set(0.0), x.at[1:3].add(2.0), x.at[np.array([0, 0])].add(1.0)), (VECTOR,)),
    ("fixed_modify", lambda x: (x.at[2].mul(3.0), x.at[0].max(9.0), x.at[0].min(-9.0), x.at[3].divide(2.0)), (VECTOR,)),
    ("fixed_row", lambda x: (x.at[1].set(x[0]), x.at[:, 2].add(x[:, 0]), x.at[0, 1].set(4.0)), (MATRIX,)),
    ("dropped", lambda x: (x.at[7].set(1.0), x.at[np.array([1, 8])].add(2.0), x.at[-9].set(3.0)), (VECTOR,)),
    ("clipped", lambda x: (x.at[7].set(1.0, mode="clip"), x.at[2:4].set(x[:2], mode="clip")), (VECTOR,)),
    ("traced_set", lambda x, i: (x.at[i].set(1.0), x.at[i].add(x[0]), x.at[i].mul(2.0)), (VECTOR, -1)),
    ("traced_drop", lambda x, i: (x.at[i].set(1.0), x.at[i].set(1.0, mode="clip")), (VECTOR, 6)),
    ("traced_row", lambda x, i: (x.at[i].set(x[0]), x.at[i, i].add(1.0), x.at[:, i].min(0.0)), (MATRIX, 2)),
    ("traced_twice", lambda x, i: x.at[i].add(jnp.ones(3)), (VECTOR, np.array([1, 1, 4]))),
    ("update_slice", lambda x, i: jax.lax.dynamic_update_slice(x, jnp.ones((2, 2)), (i, 1)), (MATRIX, 9)),
    ("update_fixed", lambda x: jax.lax.dynamic_update_slice(x, x[:1], (4,)), (VECTOR,)),
    (
        "vmapped_update",
        jax.vmap(lambda r, k: jax.lax.dynamic_update_slice(r, r[:2], (k,))),
        (MATRIX, np.array([9, 0, -1])),
    ),
    (
        "window_outside",
        lambda x, i: jax.lax.scatter_add(
            x,
            i,
            jnp.ones(2),
            jax.lax.ScatterDimensionNumbers((0,), (), (0,)),
            mode="drop",
        ),
        (VECTOR, np.array([4])),
    ),
    ("vmapped_set", lambda x, i: jax.vmap(lambda r, k: r.at[k].set(0.0))(x, i), (MATRIX, np.array([3, 0, 2]))),
]


def bounce(x: jax.Array) -> jax.Array:
    return jax.lax.cond(x[0] > 0, lambda y: jnp.sin(y), lambda y: y[::-1] * 2.0, x)


def horner(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    coefficients = jnp.array([0.5, -1.0, 2.0, 0.1, 0.3])
    return jax.lax.scan(lambda carry, c: (carry * x + c, carry.sum()), jnp.zeros_like(x), coefficients)


def power(x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(1, 4, lambda k, y: y * x + k, jnp.ones_like(x))


def counted(x: jax.Array, limit: int = 7) -> Any:
    return jax.lax.while_loop(lambda c: c[0] < limit, lambda c: (c[0] + 2, jnp.sin(c[1])), (0, x))


def search(x: jax.Array, start: Any, table: jax.Array) -> jax.Array:
    """As step size controllers look for the next of some times."""
    up = jax.lax.while_loop(lambda i: (i < table.size) & (table[i] <= x), lambda i: i + 1, start)
    return jax.lax.while_loop(lambda i: (i > 0) & (table[i - 1] > x), lambda i: i - 1, up)


def halved(x: Any) -> Any:
    """Of what is not positive the loop would never end."""
    until = lambda x: jax.lax.while_loop(lambda y: y < 10.0, lambda y: 2 * y, x)  # noqa: E731
    return jax.lax.cond(x > 0, until, lambda x: x, x)


def roots(x: jax.Array) -> Any:
    """Newton's method, element by element, and how often; a loop in a loop, and a mark that is carried."""

    def root(a: jax.Array) -> Any:
        better = lambda c: (0.5 * (c[0] + a / c[0]), c[1] + 1, jnp.abs(c[0] ** 2 - a) > 1e-3)  # noqa: E731
        return jax.lax.while_loop(lambda c: c[2], better, (a, 0, jnp.array(True)))

    def step(c: Any) -> Any:
        found = [root(jnp.abs(c[0][k]) + 0.5) for k in range(2)]
        return jnp.stack([f[0] for f in found]), c[1] + found[0][1] + found[1][1]

    return jax.lax.while_loop(lambda c: jnp.sum(jnp.abs(c[0])) > 1.9, step, (x[:2], 0))


CONTROL: list[Row] = [
    ("cond", bounce, (VECTOR,)),
    ("cond_constant", lambda x: jax.lax.cond(jnp.array(True), jnp.sin, jnp.sort, x), (VECTOR,)),
    ("switch", lambda i, x: jax.lax.switch(i, [jnp.sin, jnp.cos, lambda y: y * 2], x), (1, VECTOR)),
    ("switch_outside", lambda i, x: jax.lax.switch(i, [jnp.sin, jnp.cos, lambda y: y * 2], x), (8, VECTOR)),
    ("scan", horner, (VECTOR,)),
    ("scan_reverse", lambda x: jax.lax.scan(lambda c, r: (c + r, c * r), 0.0, x, reverse=True), (VECTOR,)),
    ("scan_empty", lambda x: jax.lax.scan(lambda c, r: (c + r, c * r), 1.0, x[:0]), (VECTOR,)),
    ("scan_unrolled", lambda x: jax.lax.scan(lambda c, r: (c + r, c * r), 0.0, x, unroll=2), (VECTOR,)),
    ("map", lambda x: jax.lax.map(jnp.sin, x), (VECTOR,)),
    ("fori_loop", power, (VECTOR,)),
    ("while_counted", counted, (VECTOR,)),
    (
        "while_long",
        lambda x: jax.lax.while_loop(lambda c: c[0] < 70, lambda c: (c[0] + 1, jnp.cos(c[1])), (0, x)),
        (VECTOR,),
    ),
    ("while", lambda x: jax.lax.while_loop(lambda y: y < 100.0, lambda y: y * 2, x), (1.0,)),
    ("while_at_once", lambda x: jax.lax.while_loop(lambda y: y < 100.0, lambda y: y * 2, x), (101.0,)),
    ("while_in_while", roots, (VECTOR,)),
    *((f"while_in_branch_{x}", halved, (x,)) for x in (-3.0, 0.0, 5.0)),
    *((f"search_{x}_{k}", search, (x, k, FORCING_T)) for x in (-9.0, 0.123, 9.0, np.nan) for k in (0, 7, 300)),
    ("search_constants", lambda x, k: search(x, k, jnp.asarray(TIMES)), (float(TIMES[4]), 9)),
    ("jit", lambda x: jax.jit(lambda y: jax.jit(jnp.sin)(y) + y)(x), (VECTOR,)),
    ("checkpoint", jax.checkpoint(lambda x: jnp.sin(jnp.cos(x))), (VECTOR,)),
    ("vmap_inside", lambda x: jax.vmap(bounce)(x), (MATRIX,)),
    ("associative_scan", lambda x: jax.lax.associative_scan(jnp.multiply, x), (VECTOR,)),
]


def solved(a: jax.Array, b: jax.Array, trans: int = 0) -> Any:
    """By LAPACK's decomposition, with its pivots."""
    factors = jax.scipy.linalg.lu_factor(a)
    return jax.scipy.linalg.lu_solve(factors, b, trans=trans), factors


def triangular(a: jax.Array, b: jax.Array, **how: Any) -> jax.Array:
    return jax.scipy.linalg.solve_triangular(a, b, **how)


PIVOTED = SQUARE * 10.0 ** -np.arange(4)[::-1, None]
SYSTEMS: list[Row] = [
    *(
        (f"lu_{n}_{t}", partial(solved, trans=t), (a, VECTOR[:4]))
        for n, a in enumerate((SQUARE, PIVOTED))
        for t in (0, 1)
    ),
    ("lu_exchanged", solved, (np.eye(4)[[2, 0, 3, 1]] + 0.0, VECTOR[:4])),
    ("lu_singular", jax.scipy.linalg.lu_factor, (np.array([[0.0, 1.0, 2.0], [0.0, 3.0, 4.0], [0.0, 5.0, 6.0]]),)),
    ("lu_columns", solved, (SQUARE, normal(4, 2))),
    ("lu_one", solved, (np.array([[3.0]]), np.array([2.0]))),
    *(
        (
            f"triangular_{low}_{t}_{unit}",
            partial(triangular, lower=low, trans=t, unit_diagonal=unit),
            (SQUARE, VECTOR[:4]),
        )
        for low in (True, False)
        for t in (0, 1)
        for unit in (True, False)
    ),
    ("sort_integers", jnp.argsort, (np.array([3, -1, 7, 3, 0]),)),
    ("lineax", lambda a, b: lx.linear_solve(lx.MatrixLinearOperator(a), b, throw=False).value, (SQUARE, VECTOR[:4])),
]

TABLES: list[Row] = [
    (f"interp_{q}", jnp.interp, (q, FORCING_T, FORCING_U))
    for q in (-9.0, float(FORCING_T[0]), 0.123, float(FORCING_T[150]), float(FORCING_T[-1]), 9.0, np.nan)
] + [
    ("interp_many", jnp.interp, (VECTOR, FORCING_T, FORCING_U)),
    ("interp_small", jnp.interp, (0.77, TIMES, np.sin(TIMES))),
    ("interp_constant", lambda q: jnp.interp(q, jnp.asarray(FORCING_T), jnp.asarray(FORCING_U)), (0.4,)),
    ("interp_scaled", lambda q, t, u: jnp.interp(q, 0.5 * t, u + 1.0), (0.4, FORCING_T, FORCING_U)),
    ("interp_column", lambda q, t, u: jnp.interp(q, t, u[:, 1]), (0.4, FORCING_T[:100], FORCING_U.reshape(100, 3))),
    *(
        (
            f"searchsorted_{side}_{method}",
            partial(jnp.searchsorted, side=side, method=method),
            (FORCING_T, np.array([0.3, -99.0, 99.0, FORCING_T[7]])),
        )
        for side in ("left", "right")
        for method in ("scan", "scan_unrolled", "compare_all")
    ),
    ("searchsorted_int", lambda t, q: jnp.searchsorted(t, q), (np.arange(0, 200, 2), 77)),
    (
        "linear_interpolation",
        lambda q, t, u: diffrax.LinearInterpolation(t, u).evaluate(q),
        (0.4, TIMES, normal(12, 2)),
    ),
    (
        "cubic_interpolation",
        lambda q, t, *c: diffrax.CubicInterpolation(t, c).derivative(q),
        (0.4, TIMES, *(normal(11, 2) for _ in range(4))),
    ),
]

PLAIN = UNARY + BINARY + STRUCTURE + REDUCTIONS + CONTRACTIONS + GATHERS + SCATTERS + CONTROL + SYSTEMS + TABLES
