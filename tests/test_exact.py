"""Closed forms against 40-digit arithmetic, against integration, and against each other."""

import itertools

import jax
import jax.numpy as jnp
import mpmath as mp
import numpy as np
import pytest

import gradflow as gf

TIGHT = gf.Method(solver="explicit", rtol=1e-12, atol=1e-14)


@pytest.fixture(autouse=True)
def _digits():
    with mp.workdps(40):
        yield


def _exact_time(s, u0, u, depth):
    """When a balanced mode passes ``u``, to 40 digits; the closed form in t is separable."""
    s, u0, u = mp.mpf(s), mp.mpf(u0), mp.mpf(u)
    if s == 0:
        if depth == 1:
            return mp.log(u0 / u)
        power = mp.mpf(2 * depth - 2) / depth
        return (u**-power - u0**-power) / (2 * depth - 2)
    if (u - s) * (u0 - s) <= 0:
        return mp.inf
    if depth == 1:
        return mp.log((s - u0) / (s - u))
    speed = depth * s ** (2 - mp.mpf(2) / depth)
    if depth == 2:
        return (mp.log(u / (s - u)) - mp.log(u0 / (s - u0))).real / speed
    a = mp.mpf(2) / depth - 1

    def primitive(x):
        if x < 1:
            return x**a / a * mp.hyp2f1(1, a, 1 + a, x)
        # Through 1/x, the primitive of the same integrand that vanishes at infinity.
        c = 1 - a
        return x**-c / c * mp.hyp2f1(1, c, 1 + c, 1 / x)

    return (primitive(u / s) - primitive(u0 / s)) / speed


def _assert_within(s, u0, t, u, depth, relative=1e-12, time_change=1e-13):
    """The true u lies within ``relative`` of ``u``, up to a relative change of t.

    u is monotone in t, so the exact times of u(1 ± ε) must bracket t; no inversion is needed.
    """
    early, late = mp.mpf(t) * (1 - time_change), mp.mpf(t) * (1 + time_change)
    low, high = mp.mpf(u) * (1 - relative), mp.mpf(u) * (1 + relative)
    if u0 > s:
        low, high = high, low
    start, end = mp.mpf(u0), mp.mpf(s)
    before = 0 if (low - start) * (end - start) <= 0 else _exact_time(s, u0, low, depth)
    after = _exact_time(s, u0, high, depth)
    assert before <= late, f"ahead of time: {s=} {u0=} {t=} {u=} {depth=}"
    assert after >= early, f"behind time: {s=} {u0=} {t=} {u=} {depth=}"


DEPTHS = (1, 2, 3, 4, 7, 20)
STRENGTHS = (0.0, 0.05, 1.0, 6.0)
STARTS = (1e-12, 1e-7, 1e-3, 0.4, 9.0)
# Fractions of the escape time: the plateau, the rise, and the approach to s.
PARTS = (1e-4, 0.5, 0.99, 1.0, 1.01, 1.5, 4.0)


def test_mode_agrees_with_forty_digits_from_plateau_to_saturation():
    points = 0
    for depth, s, u0 in itertools.product(DEPTHS, STRENGTHS, STARTS):
        scale = float(gf.exact.escape_time(s, u0, depth)) if s > u0 else 1 / max(s, 0.1)
        times = scale * np.array(PARTS) if scale > 0 else np.array(PARTS)
        for t, u in zip(times, np.asarray(gf.exact.mode(s, u0, times, depth)), strict=True):
            _assert_within(s, u0, t, u, depth)
            points += 1
    assert points >= 500


@pytest.mark.parametrize("depth", [3, 5])
@pytest.mark.parametrize("start", [0.3, 3.0])
def test_mode_crosses_the_switch_of_its_series_without_a_step(depth, start):
    # The series in x and in 1 − x meet at x = 1/2 (for a falling mode at x = 2).
    edge = 0.5 if start < 1 else 2.0
    middle = float(_exact_time(1.0, start, edge, depth))
    times = middle * (1 + np.linspace(-1e-3, 1e-3, 41))
    values = np.asarray(gf.exact.mode(1.0, start, times, depth))
    assert values.min() < edge < values.max()
    for t, u in zip(times, values, strict=True):
        _assert_within(1.0, start, t, u, depth)


def test_mode_of_strength_zero_decays_algebraically():
    times = np.array([0.0, 1.0, 1e3, 1e12])
    u = np.asarray(gf.exact.mode(0.0, 0.5, times, 3))
    np.testing.assert_allclose(u, (4 * times + 0.5 ** (-4 / 3)) ** -0.75, rtol=1e-14)


def test_mode_that_starts_at_its_strength_stays():
    np.testing.assert_array_equal(gf.exact.mode(2.0, 2.0, np.array([0.0, 1.0, 1e9]), 4), 2.0)


def test_mode_obeys_its_differential_equation_under_transformations():
    def rate(t, s, u0):
        return jax.jvp(lambda t: gf.exact.mode(s, u0, t, 3), (t,), (1.0,))[1]

    t = jnp.linspace(0.1, 3.0, 7)
    u = jax.jit(lambda t: gf.exact.mode(2.0, 0.1, t, 3))(t)
    rates = jax.vmap(lambda t: rate(t, 2.0, 0.1))(t)
    np.testing.assert_allclose(rates, 3 * u ** (4 / 3) * (2 - u), rtol=1e-9)


def test_infinite_depth_is_the_limit_of_deep_modes():
    times = np.array([0.5, 2.0, 3.0, 6.0])
    limit = np.asarray(gf.exact.infinite_depth_mode(1.0, 0.3, times))
    for t, u in zip(times, limit, strict=True):
        s, u0, exact_u = mp.mpf(1), mp.mpf(0.3), mp.mpf(u)
        when = mp.log(exact_u * (u0 - s) / (u0 * (exact_u - s))) / s**2
        when += 1 / (s * u0) - 1 / (s * exact_u)
        assert abs(when - t) < 1e-12 * t
    gaps = [
        np.abs(np.asarray(gf.exact.mode(1.0, 0.3, times / h, h)) - limit).max()
        for h in (50, 100, 200)
    ]
    # The correction is of order 1/h: u^{2−2/h} = u² (1 − (2/h) ln u + …).
    assert 1.8 < gaps[0] / gaps[1] < 2.2
    assert 1.8 < gaps[1] / gaps[2] < 2.2


@pytest.mark.parametrize("depth", [1, 2, 3, 6])
def test_escape_time_is_when_the_mode_reaches_the_fraction(depth):
    for u0, fraction in itertools.product((1e-9, 1e-2), (0.1, 0.5, 0.9)):
        t = gf.exact.escape_time(1.7, u0, depth, fraction)
        exact = _exact_time(1.7, u0, mp.mpf(1.7) * mp.mpf(fraction), depth)
        np.testing.assert_allclose(float(t), float(exact), rtol=1e-13)


@pytest.mark.parametrize(("u0", "u"), [(1e-8, 0.7), (0.6, 1.699), (5.0, 3.0), (1e3, 1.71)])
@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_mode_time_is_the_inverse_of_mode(depth, u0, u):
    t = float(gf.exact.mode_time(1.7, u0, u, depth))
    np.testing.assert_allclose(t, float(_exact_time(1.7, u0, u, depth)), rtol=1e-12)
    np.testing.assert_allclose(gf.exact.mode(1.7, u0, t, depth), u, rtol=1e-11)


def test_mode_time_is_infinite_where_the_mode_does_not_pass():
    never = gf.exact.mode_time(1.0, np.array([0.5, 0.5, 2.0]), np.array([0.1, 1.0, 3.0]), 3)
    assert np.isinf(never).all()


@pytest.mark.parametrize(
    ("a0", "b0"), [(0.9, 0.1), (0.1, 0.9), (0.3, 0.3), (1e-9, 0.0), (0.8, -0.3)]
)
def test_unbalanced_mode_time_is_the_inverse_of_unbalanced_mode(a0, b0):
    u = np.array([0.2, 0.9, 1.4])
    t = gf.exact.unbalanced_mode_time(1.5, a0, b0, np.maximum(u, a0 * b0))
    assert (np.diff(t) > 0).all()
    np.testing.assert_allclose(gf.exact.unbalanced_mode(1.5, a0, b0, t), u, rtol=1e-12)
    assert np.isinf(gf.exact.unbalanced_mode_time(1.5, a0, b0, np.array([-1.0, 1.5, 2.0]))).all()


def test_escape_time_follows_its_asymptotic_laws():
    u0 = 1e-14
    # ln(s/u_0)/(2s) at depth 2 exactly for the half; a power of u_0 beyond it.
    np.testing.assert_allclose(
        gf.exact.escape_time(2.0, u0, 2), np.log(2.0 / u0 - 1) / 4, rtol=1e-14
    )
    for depth in (3, 4, 8):
        law = u0 ** -(1 - 2 / depth) / ((depth - 2) * 2.0)
        np.testing.assert_allclose(gf.exact.escape_time(2.0, u0, depth), law, rtol=2e-2)


@pytest.mark.parametrize("c_sign", [-1, 0, 1])
def test_unbalanced_mode_obeys_the_closed_form_in_theta(c_sign):
    a0, b0 = {-1: (0.2, 0.9), 0: (0.3, 0.3), 1: (0.9, 0.1)}[c_sign]
    s, times = 1.5, np.array([0.0, 0.3, 1.0, 4.0])
    values = np.asarray(gf.exact.unbalanced_mode(s, a0, b0, times))
    c = abs(mp.mpf(a0) ** 2 - mp.mpf(b0) ** 2)  # the layers are interchangeable
    K = mp.sqrt(c**2 + 4 * mp.mpf(s) ** 2)

    def clock(u):
        if c == 0:
            return mp.log(u / (s - u)) / (2 * s)
        theta = mp.asinh(2 * mp.mpf(u) / c)
        return (2 / K * mp.atanh((c + 2 * s * mp.tanh(theta / 2)) / K)).real

    for t, u in zip(times, values, strict=True):
        late = clock(u) - clock(mp.mpf(a0) * b0) - t
        speed = mp.sqrt(c**2 + 4 * mp.mpf(u) ** 2) * (s - u)
        assert abs(late * speed) < 1e-13 * u


def test_unbalanced_mode_crosses_zero_and_never_overflows():
    times = np.array([0.0, 0.5, 3.0, 1e6])
    u = np.asarray(gf.exact.unbalanced_mode(2.0, 0.3, -0.1, times))
    assert u[0] == pytest.approx(-0.03)
    assert u[-1] == pytest.approx(2.0, rel=1e-15)
    np.testing.assert_allclose(gf.exact.unbalanced_mode(0.0, 0.2, 0.2, 1e6), 1 / (50 + 4e6) * 2)
    assert gf.exact.unbalanced_mode(2.0, 0.0, 0.0, 10.0) == 0


# Shapes (d_0, d_1, d_2) with the signs of λ that they admit: d_1 ≤ d_2 for +, d_1 ≤ d_0 for −.
SHAPES = [
    ((3, 3, 3), (-1, 0, 1)),
    ((4, 3, 4), (-1, 0, 1)),
    ((5, 2, 3), (-1, 0, 1)),
    ((5, 4, 2), (-1, 0)),
    ((2, 4, 6), (1, 0)),
    ((3, 8, 4), (0,)),
    ((4, 1, 3), (-1, 0, 1)),
]


def _two_layer_runs():
    rng = np.random.default_rng(5)
    for widths, signs in SHAPES:
        for sign in signs:
            for deficient in (False, True):
                target = rng.standard_normal((widths[2], widths[0]))
                if deficient:
                    target[0], target[:, 0] = 0, 0
                yield widths, sign * float(rng.uniform(0.2, 1.5)), target


@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_two_layer_agrees_with_integration_for_every_admissible_shape(step):
    times, count = np.array([0.0, 1e-3, 0.3, 2.0, 10.0, 30.0]), 0
    for widths, lam, target in itertools.islice(_two_layer_runs(), 0, None, step):
        problem = gf.Problem(target)
        start = gf.initialize.lambda_balanced(count, widths, 0.3, lam)
        traj = gf.simulate(gf.GradientFlow(problem), start, 30.0, save=times, method=TIGHT)
        W1, W2 = (np.asarray(w) for w in traj.states.weights)
        exact = gf.exact.two_layer(problem, start, times)
        transposed = [w.swapaxes(1, 2) for w in (W1, W2)]
        for ours, theirs in zip(
            exact, (W2 @ W1, transposed[0] @ W1, W2 @ transposed[1]), strict=True
        ):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-9)
        count += 1
    assert count * step >= 30


def test_two_layer_with_one_hidden_unit_is_exact_from_every_start():
    problem = gf.Problem(np.random.default_rng(0).standard_normal((3, 4)))
    start = gf.initialize.gaussian(3, (4, 1, 3), 0.7)
    traj = gf.simulate(gf.GradientFlow(problem), start, 20.0, save=9, method=TIGHT)
    exact = gf.exact.two_layer(problem, start, traj.ts)
    maps = jax.vmap(gf.LinearNetwork.end_to_end)(traj.states)
    np.testing.assert_allclose(exact.W, maps, rtol=0, atol=1e-10)


def test_two_layer_is_continuous_in_lambda_at_zero():
    problem = gf.Problem(np.random.default_rng(1).standard_normal((3, 3)))
    times = np.array([0.0, 1.0, 5.0, 20.0])
    middle, above, below = (
        gf.exact.two_layer(problem, gf.initialize.lambda_balanced(0, (3, 3, 3), 0.2, lam), times).W
        for lam in (0.0, 1e-9, -1e-9)
    )
    # The product of the start is the same for all three, and W(t) is even in λ from there: what
    # is left is λ² and round-off. (Much later the unstable directions of a saddle amplify both.)
    np.testing.assert_allclose(above, middle, rtol=0, atol=1e-13)
    np.testing.assert_allclose(below, middle, rtol=0, atol=1e-13)


@pytest.mark.parametrize("widths", [(6, 6, 6), (6, 3, 6), (6, 12, 6)])
def test_two_layer_reaches_the_best_map_of_its_rank_at_a_million(widths):
    problem = gf.Problem(np.random.default_rng(2).standard_normal((6, 6)))
    start = gf.initialize.balanced(4, widths, 1e-3)
    exact = gf.exact.two_layer(problem, start, np.array([1e5, 1e6]))
    U, s, Vt = np.linalg.svd(problem.target)
    rank = min(widths)
    best = (U[:, :rank] * s[:rank]) @ Vt[:rank]
    np.testing.assert_allclose(exact.W[1], best, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(exact.W[0], exact.W[1])


def test_two_layer_with_a_singular_target_decays_like_one_over_t():
    problem = gf.Problem.from_singular_values([2.0, 0.0])
    start = gf.initialize.decoupled(problem, (2, 2, 2), [0.1, 0.5])
    t = np.array([10.0, 1e6])
    # Mode of strength 0 at depth 2: u = 1/(2t + 1/u_0).
    np.testing.assert_allclose(
        gf.exact.two_layer(problem, start, t).W[:, 1, 1], 1 / (2 * t + 4), rtol=1e-12
    )


def test_sharpness_is_the_top_hessian_eigenvalue_at_a_balanced_minimum():
    values = [3.0, 2.0, 1.0]
    problem = gf.Problem.from_singular_values(values)
    for depth in (1, 2, 3, 4):
        net = gf.initialize.from_product(problem.target, (3,) * (depth + 1), key=0)
        flat, rebuild = jax.flatten_util.ravel_pytree(net)
        hessian = jax.hessian(lambda x: gf.GradientFlow(problem).loss(rebuild(x)))(flat)  # noqa: B023
        top = np.linalg.eigvalsh(hessian)[-1]
        np.testing.assert_allclose(gf.exact.sharpness(values, depth), top, rtol=1e-12)
        np.testing.assert_allclose(gf.exact.max_learning_rate(values, depth), 2 / top, rtol=1e-12)


CASES = {
    "negative_s": (lambda: gf.exact.mode(-1.0, 0.1, 1.0, 2), "s", ">= 0"),
    "zero_u0": (lambda: gf.exact.mode(1.0, 0.0, 1.0, 2), "u0", "> 0"),
    "negative_u0": (lambda: gf.exact.mode(1.0, -0.1, 1.0, 2), "u0", "> 0"),
    "negative_t": (lambda: gf.exact.mode(1.0, 0.1, -1.0, 2), "t", ">= 0"),
    "depth_0": (lambda: gf.exact.mode(1.0, 0.1, 1.0, 0), "depth", ">= 1"),
    "shapes": (lambda: gf.exact.mode(np.ones(2), 0.1, np.ones(3), 2), "s", "broadcast"),
    "no_escape": (lambda: gf.exact.escape_time(0.0, 0.1, 2), "s", "> 0"),
    "negative_strength": (lambda: gf.exact.sharpness([1.0, -1.0], 2), "singular_values", ">= 0"),
    "unbalanced": (
        lambda: gf.exact.two_layer(
            gf.Problem(np.eye(3)), gf.initialize.gaussian(0, (3, 3, 3), 0.5), 1.0
        ),
        "net",
        "‖C_1 − λI‖ = 0.7",
    ),
    "three_layers": (
        lambda: gf.exact.two_layer(
            gf.Problem(np.eye(3)), gf.initialize.balanced(0, (3, 3, 3, 3), 0.5), 1.0
        ),
        "net",
        "must have 2",
    ),
    "coloured": (
        lambda: gf.exact.two_layer(
            gf.Problem(np.eye(2), np.diag([1.0, 2.0])),
            gf.initialize.balanced(0, (2, 2, 2), 0.5),
            1.0,
        ),
        "problem",
        "whitened",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_inadmissible_arguments_are_refused_by_name(case):
    call, argument, remedy = CASES[case]
    with pytest.raises(ValueError, match=f"^{argument}: ") as caught:
        call()
    assert remedy in str(caught.value)
