"""Critical points, Hessian form, classification and escape, against theory and autodiff."""

import collections
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradflow as gf
from cases import COVARIANCE, ORACLES, TARGET, log_cosh, random_network
from gradflow import landscape
from gradflow.errors import ArgumentError

CASES = json.loads((ORACLES / "landscape.json").read_text())
IDS = [case["name"] for case in CASES]


def from_case(case):
    weights = [np.array(w, dtype=float) for w in case["weights"]]
    return gf.Problem(np.array(case["target"], dtype=float)), gf.LinearNetwork(weights)


def rotation(rng, d):
    return np.linalg.qr(rng.standard_normal((d, d)))[0]


def separated(rng, count):
    """Singular values at least 0.2 apart."""
    return np.sort(rng.uniform(0.5, 1.0, count) + 0.7 * np.arange(count))[::-1]


def random_problem(rng, widths, coloured):
    count = min(widths[0], widths[-1])
    left, right = rotation(rng, widths[-1]), rotation(rng, widths[0])
    target = (left[:, :count] * separated(rng, count)) @ right[:, :count].T
    if not coloured:
        return gf.Problem(target)
    X = rng.standard_normal((widths[0] + 4, widths[0]))
    return gf.Problem(target, X.T @ X / len(X))


def loss(problem, weights):
    """The loss, multiplied out here and not by the library."""
    W = functools.reduce(lambda product, w: w @ product, weights)
    gap = W - np.asarray(problem.optimum)
    C = problem.input_covariance
    return 0.5 * np.trace(gap @ (np.eye(gap.shape[1]) if C is None else np.asarray(C)) @ gap.T)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_oracles_kind_inertia_tightened_and_smallest_eigenvalue(case):
    problem, net = from_case(case)
    found = landscape.classify(problem, net)
    assert found.kind == case["kind"]
    assert found.agree
    assert found.inertia == tuple(case["inertia"])
    assert found.tightened is case["tightened"]
    assert abs(found.smallest_eigenvalue - case["smallest_eigenvalue"]) < 1e-8
    assert len(found.signature) == case["rank"]
    assert landscape.inertia(problem, net) == tuple(case["inertia"])


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_kind_and_signature_survive_moves_in_the_fibre_and_changes_of_data_basis(case):
    problem, net = from_case(case)
    reference = landscape.classify(problem, net)
    moved = landscape.move_in_fiber(5, net)
    pairs = zip(moved.weights, net.weights, strict=True)
    assert all(jnp.abs(a - b).max() > 0.01 or not jnp.any(b) for a, b in pairs)
    U, V = (rotation(np.random.default_rng(3), 3) for _ in range(2))
    turned = gf.Problem(U @ np.asarray(problem.target) @ V.T)
    first, *rest, last = moved.weights
    turned_net = gf.LinearNetwork([first @ V.T, *rest, U @ last])
    for found in (landscape.classify(problem, moved), landscape.classify(turned, turned_net)):
        assert found.kind == case["kind"]
        assert found.signature == reference.signature
        assert found.inertia == reference.inertia
        assert found.tightened is case["tightened"]


def random_points(count=300):
    rng = np.random.default_rng(11)
    for seed in range(count):
        depth = int(rng.integers(2, 6))
        widths = tuple(int(d) for d in rng.integers(1, 5, depth + 1))
        problem = random_problem(rng, widths, coloured=seed % 3 == 0)
        most = min(widths)
        modes = min(widths[0], widths[-1])
        size = int(rng.integers(0, most + 1))
        signature = tuple(sorted(int(i) + 1 for i in rng.choice(modes, size, replace=False)))
        loose = bool(rng.integers(2)) and size < min(*widths[1:-1], modes)
        net = landscape.critical_point(problem, widths, signature, key=seed, tightened=not loose)
        yield problem, widths, signature, loose, net


def test_theory_and_inertia_agree_at_300_random_critical_points_and_none_is_spurious():
    kinds = collections.Counter()
    tried, minima, maxima = 0, 0, 0
    for problem, widths, signature, loose, net in random_points():
        found = landscape.classify(problem, net)
        assert found.agree, found
        assert found.signature == signature
        assert found.gradient_norm < 1e-10
        value = dict(landscape.critical_values(problem, widths))[signature]
        assert abs(found.value - value) < 1e-10
        if len(widths) > 3 and found.kind != "global_minimum":
            assert found.tightened is not loose
        top = signature == tuple(range(1, len(signature) + 1))
        full = len(signature) == min(widths)
        assert (found.kind == "global_minimum") is (top and full)
        assert (found.kind == "nonstrict_saddle") is (
            top and not full and not loose and len(widths) > 3
        )
        kinds[found.kind] += 1
        if found.kind == "global_minimum":
            continue
        tried += 1
        V, _ = landscape.escape_direction(problem, net)
        weights = [np.asarray(w) for w in net.weights]
        steps = [np.asarray(v) for v in V.weights]
        here = loss(problem, weights)
        tau = 0.1
        ahead = [w + tau * v for w, v in zip(weights, steps, strict=True)]
        minima += not loss(problem, ahead) < here
        # Turning the first of the moved layers round turns the gain into a loss.
        rising = found.inertia.positive > 0
        if not rising:
            first = next(i for i, v in enumerate(steps) if v.any())
            steps[first] = -steps[first]
            behind = [w + tau * v for w, v in zip(weights, steps, strict=True)]
            rising = loss(problem, behind) > here
        maxima += not rising
    print(f"tried {tried} saddles: {minima} spurious minima, {maxima} maxima; {dict(kinds)}")
    assert min(kinds.values()) > 40
    assert (minima, maxima) == (0, 0)


def test_pivot_whose_sides_the_residual_does_not_join_is_inert():
    # All three blocks of the pivot (3, 2) have rank above 0, yet the Hessian vanishes.
    problem = gf.Problem.from_singular_values([3.0, 2.0, 1.0])
    zero = np.zeros((3, 3))

    def network(i, j):
        first, last = zero.copy(), zero.copy()
        first[0, j], last[i, 0] = 1.0, 1.0
        return gf.LinearNetwork([first, zero, zero, last])

    apart = landscape.classify(problem, network(0, 1))
    assert apart.kind == "nonstrict_saddle"
    assert not apart.tightened
    assert apart.inertia == (0, 36, 0)
    assert apart.escape_order == 3
    together = landscape.classify(problem, network(1, 1))
    assert together.kind == "strict_saddle"
    assert not together.tightened
    V, order = landscape.escape_direction(problem, network(0, 1))
    taus = np.geomspace(1e-3, 1e-2, 5)
    change = np.asarray(landscape.loss_change(problem, network(0, 1), V, taus))
    assert order == 3
    assert (change < 0).all()
    assert abs(np.polyfit(np.log(taus), np.log(-change), 1)[0] / 3 - 1) < 0.01


@pytest.mark.parametrize("defect", ["rank deficient target", "equal values", "singular inputs"])
def test_theory_and_inertia_agree_where_the_data_are_degenerate(defect):
    rng = np.random.default_rng(2)
    for seed in range(40):
        widths = tuple(int(d) for d in rng.integers(2, 5, int(rng.integers(3, 6))))
        count = min(widths[0], widths[-1])
        s = separated(rng, count)
        if defect == "rank deficient target":
            s[int(rng.integers(1, count)) :] = 0
        elif defect == "equal values":
            s[1] = s[0]
        left, right = rotation(rng, widths[-1]), rotation(rng, widths[0])
        target = (left[:, :count] * s) @ right[:, :count].T
        covariance = None
        if defect == "singular inputs":
            X = rng.standard_normal((widths[0] - 1, widths[0]))
            covariance = X.T @ X
            target = target @ covariance
        problem = gf.Problem(target, covariance)
        values = landscape.critical_values(problem, widths)
        signature, value = values[int(rng.integers(len(values)))]
        found = landscape.classify(
            problem, landscape.critical_point(problem, widths, signature, key=seed)
        )
        assert found.agree, found
        assert found.signature in landscape.continuum(problem, widths, signature).signatures
        scale = float(problem.singular_values[0])
        assert found.gradient_norm < 1e-11 * scale**2
        assert abs(found.value - value) < 1e-11 * scale**2


@pytest.mark.parametrize("depth", [2, 3, 4])
def test_spectrum_of_balanced_minimum(depth):
    s = np.array([3.0, 2.0, 1.0])
    problem = gf.Problem.from_singular_values(s)
    net = landscape.critical_point(problem, (3,) * (depth + 1), (1, 2, 3))
    powers = np.arange(1, depth + 1)
    expected = np.zeros(9 * depth)
    expected[:9] = [
        np.sum(a ** (2 * (depth - powers) / depth) * b ** (2 * (powers - 1) / depth))
        for a in s
        for b in s
    ]
    found = landscape.spectrum(problem, net)
    np.testing.assert_allclose(found, np.sort(expected), atol=1e-9)
    np.testing.assert_allclose(found[-1], gf.exact.sharpness(s, depth), rtol=1e-12)


def test_spectrum_of_two_layer_saddle():
    problem = gf.Problem.from_singular_values([3.0, 2.0, 1.0])
    net = landscape.critical_point(problem, (3, 3, 3), (1,))
    counted = [-2, -2, -1, -1, *[0] * 5, *[1] * 3, *[2] * 3, 4, 5, 6]
    np.testing.assert_allclose(landscape.spectrum(problem, net), counted, atol=1e-9)


SHAPES = [(4, 3, 5, 3), (3, 2, 4), (2, 3, 3, 3, 4)]


@functools.cache
def reference_product(kind, widths):
    problem = {
        "whitened": lambda T, C: gf.Problem(T),
        "coloured": gf.Problem,
        "from_loss": lambda T, C: gf.Problem.from_loss(log_cosh, T.shape),
    }[kind](*_data(widths))

    @jax.jit
    def product(net, V):
        gradient = jax.grad(lambda n: problem.loss(n.end_to_end()))
        return jax.jvp(gradient, (net,), (V,))[1]

    return problem, product


def _data(widths):
    rng = np.random.default_rng(0)
    if widths == SHAPES[0]:
        return TARGET, COVARIANCE
    X = rng.standard_normal((9, widths[0]))
    return rng.standard_normal((widths[-1], widths[0])), X.T @ X / 9


@pytest.mark.parametrize(
    ("kind", "widths"),
    [("whitened", SHAPES[1]), ("coloured", SHAPES[0]), ("coloured", SHAPES[2]),
     ("from_loss", SHAPES[0]), ("whitened", SHAPES[0])],
)  # fmt: skip
def test_hessian_product_equals_autodiff_on_random_networks(kind, widths):
    problem, product = reference_product(kind, widths)
    rng = np.random.default_rng(4)
    for _ in range(10):  # 50 over the five cases
        net, V, V2 = (random_network(rng, widths) for _ in range(3))
        found = landscape.hessian_product(problem, net, V)
        expected = product(net, V)
        for a, b in zip(found.weights, expected.weights, strict=True):
            np.testing.assert_allclose(a, b, atol=1e-11)
    form = landscape.hessian_form(problem, net, V, V2)
    paired = sum(float(jnp.sum(a * b)) for a, b in zip(expected.weights, V2.weights, strict=True))
    np.testing.assert_allclose(form, paired, rtol=1e-11)
    np.testing.assert_allclose(landscape.hessian_form(problem, net, V2, V), form, rtol=1e-11)
    columns = landscape.hessian_matrix(problem, net)
    flat = np.concatenate([np.asarray(v).ravel() for v in V.weights])
    wanted = np.concatenate([np.asarray(p).ravel() for p in found.weights])
    np.testing.assert_allclose(np.asarray(columns) @ flat, wanted, atol=1e-11)


def test_hessian_form_is_the_second_derivative_of_the_loss_along_a_line():
    problem, net = from_case(CASES[1])
    V = random_network(np.random.default_rng(1), net.widths)
    step = 1e-4

    def at(epsilon):
        pairs = zip(net.weights, V.weights, strict=True)
        return loss(problem, [np.asarray(w + epsilon * v) for w, v in pairs])

    difference = (at(step) - 2 * at(0.0) + at(-step)) / step**2
    np.testing.assert_allclose(landscape.hessian_form(problem, net, V), difference, rtol=1e-5)


def test_hessian_product_goes_through_jit_and_vmap_without_retracing():
    problem, _ = reference_product("coloured", SHAPES[0])
    traces = []

    @jax.jit
    def products(net, many):
        traces.append(0)
        return jax.vmap(landscape.HessianOperator(problem, net))(many)

    rng = np.random.default_rng(0)
    for _ in range(2):
        net, *directions = (random_network(rng, SHAPES[0]) for _ in range(3))
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *directions)
        found = products(net, stacked)
        one = landscape.hessian_product(problem, net, directions[1])
        np.testing.assert_allclose(found.weights[1][1], one.weights[1], atol=1e-12)
    assert len(traces) == 1


@pytest.mark.parametrize("signature", [(1, 2, 3), (1, 3)], ids=["minimum", "strict saddle"])
def test_products_alone_find_the_smallest_eigenvalues_with_their_multiplicities(signature):
    from gradflow.landscape import hessian

    problem = gf.Problem.from_singular_values([3.0, 2.0, 1.0], (8, 10))
    net = landscape.critical_point(problem, (10, 9, 8), signature, key=1)
    exact = np.linalg.eigvalsh(np.asarray(landscape.hessian_matrix(problem, net)))
    found, vectors = hessian.lowest(problem, net, 12)
    np.testing.assert_allclose(found, exact[:12], atol=1e-6 * exact[-1])
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(12), atol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("place", ["minimum", "saddle", "anywhere"])
def test_ten_smallest_eigenvalues_of_100000_parameters(place):
    rng = np.random.default_rng(0)
    widths, s = (183,) * 4, np.linspace(4.0, 0.2, 183)
    problem = gf.Problem((rotation(rng, 183) * s) @ rotation(rng, 183))
    if place == "anywhere":
        net = gf.initialize.gaussian(0, widths, 1.0)
        found = landscape.spectrum(problem, net, 10)
        assert found[0] < found[9] < 0
        return
    signature = range(1, 184) if place == "minimum" else (1, 2, 4)
    found = landscape.spectrum(problem, landscape.critical_point(problem, widths, signature), 10)
    expected = np.zeros(10)
    if place == "saddle":
        # The exchange of mode 4 for mode 3 moves nothing but these modes: four of them are enough.
        small = gf.Problem.from_singular_values(s[:4])
        canonical = landscape.critical_point(small, (4, 4, 4, 4), signature)
        expected[0] = landscape.spectrum(small, canonical)[0]
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("depth", [2, 3, 4, 5, 6])
def test_loss_falls_at_order_h_from_the_origin(depth):
    problem = gf.Problem(TARGET[:, :3])
    net = gf.LinearNetwork([np.zeros((3, 3))] * depth)
    V, order = landscape.escape_direction(problem, net)
    assert order == depth == landscape.classify(problem, net).escape_order
    np.testing.assert_allclose(sum(float(jnp.sum(v**2)) for v in V.weights), 1.0, rtol=1e-12)
    taus = np.geomspace(1e-3, 1e-2, 6)
    change = np.asarray(landscape.loss_change(problem, net, V, taus))
    assert (change < 0).all()
    assert abs(np.polyfit(np.log(taus), np.log(-change), 1)[0] / depth - 1) < 0.01


def test_no_direction_descends_from_a_global_minimum():
    problem = gf.Problem.from_singular_values([2.0, 1.0])
    net = landscape.critical_point(problem, (2, 3, 2), (1, 2), key=0)
    with pytest.raises(ArgumentError, match="net: got a global minimum"):
        landscape.escape_direction(problem, net)


def test_state_with_a_gradient_of_1e_8_is_classified_and_1e_2_is_not_critical():
    rng = np.random.default_rng(0)
    problem = gf.Problem.from_singular_values([3.0, 2.0, 1.0])
    for signature, kind in [((1,), "nonstrict_saddle"), ((2,), "strict_saddle"),
                            ((1, 2, 3), "global_minimum")]:  # fmt: skip
        exact = landscape.critical_point(problem, (3, 4, 3, 3), signature, key=2)
        for size, wanted in [(3e-9, kind), (1e-2, "not_critical")]:
            noisy = exact.with_weights(
                tuple(w + size * rng.standard_normal(w.shape) for w in exact.weights)
            )
            found = landscape.classify(problem, noisy)
            assert found.kind == wanted
            assert found.gradient_norm > 1e-9
    assert found.signature is None
    assert found.escape_order == 1
    assert "not_critical" in repr(found)


def test_disagreement_is_reported_and_not_decided():
    problem = gf.Problem.from_singular_values([3.0, 2.0, 1.0])
    exact = landscape.critical_point(problem, (3, 3, 3, 3), (1,), tightened=False)
    found = landscape.classify(problem, exact, eigenvalue_tol=100.0)
    assert found.kind == "undecided"
    assert not found.agree
    assert (found.theory, found.numerical) == ("strict_saddle", "nonstrict_saddle")
    assert "strict_saddle" in found.reason


def test_critical_values_are_sorted_and_complete():
    problem = gf.Problem.from_singular_values([3.0, 2.0, 1.0])
    found = landscape.critical_values(problem, (3, 3, 3))
    assert [signature for signature, _ in found[:3]] == [(1, 2, 3), (1, 2), (1, 3)]
    assert len(found) == 8
    np.testing.assert_allclose([value for _, value in found], sorted(v for _, v in found))
    np.testing.assert_allclose(found[-1][1], 7.0)
    assert len(landscape.critical_values(problem, (3, 2, 3))) == 7  # all but the full one
    assert landscape.critical_values(problem, (3, 3)) == [((1, 2, 3), 0.0)]


def test_equal_singular_values_make_grassmannians():
    problem = gf.Problem.from_singular_values([2.0, 2.0, 2.0, 1.0])
    found = landscape.continuum(problem, (4, 4, 4), (1, 4))
    assert found.dimension == 2
    assert found.groups == [(2.0, 3, 1)]
    assert found.signatures == [(1, 4), (2, 4), (3, 4)]
    # Any direction of the singular space is critical.
    direction = np.array([[2.0], [-1.0], [2.0], [0.0]]) / 3
    net = gf.LinearNetwork([direction.T, 2 * direction])
    verdict = landscape.classify(problem, net)
    assert verdict.signature == (1,)
    assert verdict.distance < 1e-12
    assert verdict.kind == "global_minimum"


def test_problem_given_by_a_loss_has_a_hessian_and_no_known_critical_points():
    problem = gf.Problem.from_loss(log_cosh, TARGET.shape)
    net = random_network(np.random.default_rng(0), SHAPES[0])
    assert sum(landscape.inertia(problem, net)) == 42
    assert landscape.spectrum(problem, net, 3).shape == (3,)
    for call in (
        lambda: landscape.critical_values(problem, SHAPES[0]),
        lambda: landscape.critical_point(problem, SHAPES[0], (1,)),
        lambda: landscape.classify(problem, net),
    ):
        with pytest.raises(ArgumentError, match="problem: got a problem given by a loss"):
            call()


@pytest.mark.parametrize(
    ("signature", "message"),
    [
        ((1, 4), r"signature: got \(1, 4\); mode numbers go from 1 to 3"),
        ((0,), r"signature\[0\]: got 0"),
        ((1, 1), r"signature: got \(1, 1\); no mode may be repeated"),
        ((1, 2, 3), r"signature: got .* 3 modes; the narrowest layer .* has room for 2"),
        (3, "signature: got 3"),
    ],
)
def test_bad_signature_is_refused_by_name(signature, message):
    problem = gf.Problem.from_singular_values([3.0, 2.0, 1.0])
    with pytest.raises(ArgumentError, match=message):
        landscape.critical_point(problem, (3, 2, 3), signature)


def test_nan_and_other_widths_are_refused_by_name():
    problem = gf.Problem.from_singular_values([3.0, 2.0, 1.0])
    good = gf.LinearNetwork([np.eye(3), np.eye(3)])
    nan = good.with_weights((good.weights[0].at[0, 0].set(jnp.nan), good.weights[1]))
    wide = gf.LinearNetwork([np.ones((2, 4)), np.ones((3, 2))])
    for function in (
        landscape.classify,
        landscape.inertia,
        landscape.spectrum,
        landscape.escape_direction,
        landscape.local_sets,
        lambda p, n: landscape.hessian_product(p, n, n),
    ):
        with pytest.raises(ArgumentError, match="net: got 1 entries of W_1 that are not finite"):
            function(problem, nan)
        with pytest.raises(ArgumentError, match=r"widths: got \(4, 2, 3\)"):
            function(problem, wide)
    with pytest.raises(ArgumentError, match="V: got LinearNetwork"):
        landscape.hessian_product(problem, good, wide)
    with pytest.raises(ArgumentError, match="tightened: got False"):
        landscape.critical_point(problem, (3, 2, 3, 3), (1, 2), tightened=False)


@pytest.mark.parametrize("tightened", [True, False])
def test_unstable_stable_and_blind_directions_add_up(tightened):
    problem = gf.Problem.from_singular_values([3.0, 2.0, 1.0])
    net = landscape.critical_point(problem, (3, 3, 3, 3), (1,), tightened=tightened, key=4)
    sets = landscape.local_sets(problem, net)
    negative, zero, positive = sets.inertia
    assert sets.unstable.weights[0].shape == (negative, 3, 3)
    assert sets.stable.weights[2].shape == (positive, 3, 3)
    assert sets.orbit + sets.blind == zero
    assert (sets.escape is None) is not tightened
    if negative:
        V = jax.tree.map(lambda x: x[0], sets.unstable)
        np.testing.assert_allclose(landscape.hessian_form(problem, net, V), sets.rates[0])
