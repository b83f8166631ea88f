"""Rosenbrock methods for stiff systems: each stage solves one linear system, all of a step with the same matrix."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import lineax as lx
from jax.flatten_util import ravel_pytree

from gradsolve_backend.adapters.once import Once
from gradsolve_backend.adapters.rosenbrock_methods import RODAS4, RODAS5P, ROSENBROCK23, RosenbrockTableau
from gradsolve_backend.kernels.compat import WrapTerm, linear_rescale
from gradsolve_backend.kernels.dense import factorise, implicit_solve, solver
from gradsolve_backend.kernels.erk import combine
from gradsolve_backend.kernels.scalar import SPARSE

RESULTS: Any = diffrax.RESULTS
Solve = Callable[[Any], Any]  # of a right-hand side, both of shape (n,)


class RosenbrockInterpolation(diffrax.AbstractLocalInterpolation):
    """Dense output of a Rosenbrock method: between the ends of the step, plus `s (1 - s)` times a polynomial.

    **Arguments:** `t0`, `t1`, `y0`, `y1`: the ends. `k`: the coefficients of the polynomial, the constant first, in an
    axis in front of each leaf of the state.
    """

    t0: Any
    t1: Any
    y0: Any
    y1: Any
    k: Any

    def evaluate(self, t0: Any, t1: Any | None = None, left: bool = True) -> Any:
        """The state at `t0`, or the difference of that at `t1` and that at `t0`."""
        if t1 is not None:
            return jtu.tree_map(jnp.subtract, self.evaluate(t1), self.evaluate(t0))
        share = jnp.asarray(linear_rescale(self.t0, t0, self.t1))

        def leaf(y0: Any, y1: Any, k: Any) -> Any:
            s = share.astype(y0.dtype)
            inner = k[-1]
            for row in k[-2::-1]:
                inner = row + s * inner
            return (1 - s) * y0 + s * (y1 + (1 - s) * inner)

        return jtu.tree_map(leaf, self.y0, self.y1, self.k)


@dataclass(frozen=True, eq=False)
class _Flat:
    """The field of one step, times its length, as a function of the state as an array of shape (n,)."""

    terms: Any
    args: Any
    control: Any
    unravel: Callable
    vf: Once

    def __call__(self, t: Any, y: Any) -> Any:
        field = self.vf(t, self.unravel(y), self.args)
        return _ravel(self.terms.prod(field, self.control))


def _ravel(tree: Any) -> Any:
    with jax.numpy_dtype_promotion("standard"):
        return ravel_pytree(tree)[0]


def _sparse(function: Callable) -> Callable:
    """The function under a name by which the scalariser leaves out zeros times anything."""

    def named(*arguments: Any) -> Any:
        return function(*arguments)

    named.__name__ = SPARSE
    return jax.jit(named)


class AbstractRosenbrock(diffrax.AbstractAdaptiveSolver):
    """A Rosenbrock method for `diffrax.ODETerm`; a subclass gives the tableau.

    **Arguments:**

    - `jacobian`: a function of `(t, y, args)`, the derivative of the vector field by `y`: what `jax.jacfwd` makes of
      it, of shape `(n, n)` for a state of shape `(n,)`, or a `lineax.AbstractLinearOperator`. By default it is computed
      in forward mode.
    - `linear_solver`: any solver of Lineax, for systems that need another than the LU decomposition of a full matrix.
      It is given a `lineax.AbstractLinearOperator`; to have the tags of a banded matrix, say, let `jacobian` return an
      operator with them. A solver without a matrix, such as `lineax.GMRES`, then never sees one.

    A step whose linear system is singular, or has values that are not finite, is rejected by the controller and tried
    again, shorter. Where nothing can reject it the solve ends with the result `singular`.
    """

    tableau: ClassVar[RosenbrockTableau]
    jacobian: Callable | None = None
    linear_solver: lx.AbstractLinearSolver | None = None

    term_structure: ClassVar = diffrax.ODETerm
    interpolation_cls: ClassVar[Callable[..., RosenbrockInterpolation]] = RosenbrockInterpolation

    def order(self, terms: Any) -> int:
        """Order of the solution."""
        return self.tableau.order

    def error_order(self, terms: Any) -> int:
        """Order of the error estimate."""
        return self.tableau.error_order

    def init(self, terms: Any, t0: Any, t1: Any, y0: Any, args: Any) -> None:
        """No state is carried from step to step."""
        for leaf in jtu.tree_leaves(y0):
            if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
                raise ValueError(
                    f"{type(self).__name__} was given a state of dtype {jnp.result_type(leaf)}. It solves for real "
                    "floating-point states: give real and imaginary parts as two arrays."
                )

    def func(self, terms: Any, t0: Any, y0: Any, args: Any) -> Any:
        """The vector field."""
        return terms.vf(t0, y0, args)

    def step(self, terms: Any, t0: Any, t1: Any, y0: Any, args: Any, solver_state: Any, made_jump: Any) -> Any:
        """One step from `t0` to `t1`."""
        del solver_state, made_jump
        tableau = self.tableau
        with jax.numpy_dtype_promotion("standard"):
            flat, unravel = ravel_pytree(y0)
        field = _Flat(terms, args, terms.contr(t0, t1), unravel, Once(terms.vf))
        first = field(t0, flat)  # traced here, outside of the derivatives, for all uses
        rate, solve = _rate(field, t0, t1, flat), self._solve(field, t0, flat)
        stages, last = _stages(tableau, field, solve, (t0, t1), (flat, first, rate))
        if tableau.singly:
            y1 = last + stages[-1]
        else:
            y1 = flat + combine(tableau.solution, stages)
        result = RESULTS.where(jnp.all(jnp.isfinite(y1)), RESULTS.successful, RESULTS.singular)
        k = [unravel(combine(row, stages)) for row in tableau.dense]
        dense = {"y0": y0, "y1": unravel(y1), "k": jtu.tree_map(lambda *x: jnp.stack(x), *k)}
        return dense["y1"], unravel(combine(tableau.error, stages)), dense, None, result

    def _solve(self, field: _Flat, t: Any, y: Any) -> Solve:
        """Solves with the matrix of a step, `I / gamma - h J`."""
        given = None if self.jacobian is None else self._given(field, t, y)
        if self.linear_solver is not None:
            return _by_lineax(self.linear_solver, _operator(self.tableau.gamma, field, given, t, y))
        if given is None:
            jacobian = _sparse(lambda t, y: jax.jacfwd(lambda x: field(t, x))(y))(t, y)
        else:
            jacobian = given.as_matrix()
        matrix = jnp.eye(y.size, dtype=y.dtype) / self.tableau.gamma - jacobian
        factors = factorise(matrix)
        return lambda b: implicit_solve(lambda x: matrix @ x, b, solver(factors), solver(factors, transposed=True))

    def _given(self, field: _Flat, t: Any, y: Any) -> lx.AbstractLinearOperator:
        """The user's Jacobian times the length of the step."""
        assert self.jacobian is not None
        terms, state = field.terms, field.unravel(y)
        # Diffrax solves backwards in time by time that runs forwards.
        time = t * terms.direction if isinstance(terms, WrapTerm) else t
        found = self.jacobian(time, state, field.args)
        if not isinstance(found, lx.AbstractLinearOperator):
            found = lx.PyTreeLinearOperator(found, jax.eval_shape(lambda: state))
        return found * jnp.asarray(field.control, y.dtype)


def _rate(field: _Flat, t0: Any, t1: Any, y: Any) -> Any:
    """The field's derivative by time times the length of the step; zeros that are known while tracing stay known."""
    t0 = jnp.asarray(t0)

    def rate(t0: Any, length: Any, y: Any) -> Any:
        slope = jax.jvp(lambda t: field(t, y), (t0,), (jnp.ones_like(t0),))[1]
        return length.astype(y.dtype) * slope

    return _sparse(rate)(t0, t1 - t0, y)


def _stages(
    tableau: RosenbrockTableau, field: _Flat, solve: Solve, interval: tuple[Any, Any], start: tuple[Any, Any, Any]
) -> tuple[list[Any], Any]:
    """The stages of a step, and the argument of the last one; `start`: state, field, and the field's derivative."""
    (t0, t1), (y, right, rate) = interval, start
    stages, argument = [solve(right + tableau.rates[0] * rate)], y
    for a, c, time, gamma in list(zip(tableau.a, tableau.c, tableau.times, tableau.rates, strict=True))[1:]:
        argument = y + combine(a, stages)
        right = field(t1 if time == 1 else t0 + time * (t1 - t0), argument) + combine(c, stages)
        stages.append(solve(right + gamma * rate if gamma else right))
    return stages, argument


def _operator(
    gamma: float, field: _Flat, jacobian: lx.AbstractLinearOperator | None, t: Any, y: Any
) -> lx.AbstractLinearOperator:
    """The matrix of a step as an operator; without a Jacobian it is known by its products only."""
    if jacobian is not None:
        return lx.IdentityLinearOperator(jacobian.in_structure()) / gamma + -jacobian
    product = lambda x: x / gamma - jax.jvp(lambda z: field(t, z), (y,), (x,))[1]  # noqa: E731
    return lx.FunctionLinearOperator(product, jax.eval_shape(lambda: y))


def _by_lineax(method: lx.AbstractLinearSolver, operator: lx.AbstractLinearOperator) -> Solve:
    """Solves by a solver of Lineax, which is not differentiated; a solution it did not find is NaN."""
    fixed = jtu.tree_map(lambda x: jax.lax.stop_gradient(x) if eqx.is_array(x) else x, operator)
    state = method.init(fixed, {})
    turned = method.transpose(state, {})
    _, unravel = ravel_pytree(jtu.tree_map(lambda x: jnp.zeros(x.shape, x.dtype), operator.in_structure()))

    def run(b: Any, state: Any, options: Any) -> Any:
        value, result, _ = method.compute(state, unravel(b), options)
        return _ravel(jtu.tree_map(lambda x: jnp.where(result == lx.RESULTS.successful, x, jnp.nan), value))

    product = lambda x: _ravel(operator.mv(unravel(x)))  # noqa: E731
    return lambda b: implicit_solve(product, b, lambda x: run(x, state, {}), lambda x: run(x, *turned))


class Rosenbrock23(AbstractRosenbrock):
    """Order 2, three stages, L-stable: for loose tolerances, and where the vector field is not smooth.

    Error estimate of order 3, dense output of order 2. Shampine and Reichelt, The MATLAB ODE Suite, SIAM Journal on
    Scientific Computing 18 (1997), https://doi.org/10.1137/S1064827594276424.
    """

    tableau: ClassVar[RosenbrockTableau] = ROSENBROCK23


class Rodas4(AbstractRosenbrock):
    """Order 4, six stages, L-stable and stiffly accurate: for moderate tolerances.

    Error estimate of order 4, dense output of order 3. Hairer and Wanner, Solving Ordinary Differential Equations II,
    section IV.7, https://doi.org/10.1007/978-3-642-05221-7.
    """

    tableau: ClassVar[RosenbrockTableau] = RODAS4


class Rodas5P(AbstractRosenbrock):
    """Order 5, eight stages, L-stable and stiffly accurate: the first choice for stiff systems.

    Error estimate of order 5, dense output of order 4; keeps its order on many problems where stiffness takes it from
    other methods. Steinebach, Construction of Rosenbrock-Wanner method Rodas5P and numerical benchmarks within the
    Julia Differential Equations package, BIT Numerical Mathematics 63 (2023),
    https://doi.org/10.1007/s10543-023-00967-x.
    """

    tableau: ClassVar[RosenbrockTableau] = RODAS5P
