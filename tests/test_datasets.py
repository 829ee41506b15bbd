"""The bundled data, and learning it."""

import numpy as np
import pytest

import gradflow as gf

WIDTHS = (64, 10, 10)


@pytest.fixture(scope="module")
def digits():
    return gf.datasets.digits()


def test_digits_are_1797_images_with_one_hot_labels(digits):
    X, Y = digits
    assert X.shape == (1797, 64)
    assert Y.shape == (1797, 10)
    assert X.min() == 0
    assert X.max() == 1
    np.testing.assert_array_equal(Y.sum(axis=1), 1)
    assert set(np.unique(Y)) == {0.0, 1.0}


@pytest.mark.parametrize("whiten", [False, True], ids=["raw", "whitened"])
def test_digits_report_says_rank_61_of_64(digits, whiten):
    built = gf.Problem.from_data(*digits, whiten=whiten)
    report = built.assumptions(WIDTHS)
    assert report["full_rank_inputs"].number == 61
    assert not report["full_rank_inputs"].holds
    assert "61 of 64" in str(report)
    assert report["overdetermined"].holds
    assert report["full_rank_target"].holds
    assert np.linalg.matrix_rank(digits.X) == 61


def test_digits_loss_is_half_the_mean_squared_error(digits):
    X, Y = digits
    W = np.random.default_rng(0).standard_normal((10, 64))
    built = gf.Problem.from_data(X, Y)
    expected = 0.5 * np.mean(np.sum((Y - X @ W.T) ** 2, axis=1))
    assert float(built.loss(W)) == pytest.approx(expected, rel=1e-12)
    fit = np.linalg.lstsq(X, Y, rcond=1e-10)[0]
    floor = 0.5 * np.mean(np.sum((Y - X @ fit) ** 2, axis=1))
    assert float(built.irreducible_loss) == pytest.approx(floor, rel=1e-10)


def learn_whitened(problem, net):
    method = gf.Method(solver="explicit", atol=1e-12)
    return gf.simulate(gf.GradientFlow(problem), net, 60.0, save=300, method=method)


@pytest.fixture(scope="module")
def whitened(digits):
    return gf.Problem.from_data(*digits, whiten=True)


@pytest.fixture(scope="module")
def whitened_run(whitened):
    return learn_whitened(whitened, gf.initialize.balanced(0, WIDTHS, 1e-3))


def test_whitened_digits_are_learnt_in_the_order_of_their_singular_values(whitened):
    # Balanced and aligned with the data: every mode starts at the same strength 1e-6.
    traj = learn_whitened(whitened, gf.initialize.decoupled(whitened, WIDTHS, 1e-3))
    learnt = gf.observables.learning_times(traj)
    np.testing.assert_array_equal(learnt.order, np.arange(10))
    s = np.asarray(whitened.singular_values)
    # Half time of the logistic curve; interpolation between saves 0.2 apart, u''/u' <= 2s.
    expected = np.log(s / 1e-6 - 1) / (2 * s)
    np.testing.assert_allclose(learnt.times, expected, rtol=0, atol=0.2**2 * 2 * s[0] / 8 + 1e-3)


def test_well_separated_whitened_digit_modes_are_learnt_in_order_from_random_directions(
    whitened, whitened_run
):
    assert whitened_run.status is gf.Status.REACHED_END
    s = np.asarray(whitened.singular_values)
    times = gf.observables.learning_times(whitened_run).times
    # Modes start at 1e-6 times a random factor: ln(s/u_0)/2s, with the logarithm 12 ± 1.
    apart = s[:, None] > 1.1 * s[None, :]
    assert apart.sum() > 20
    assert np.all((times[:, None] < times[None, :])[apart])
    np.testing.assert_allclose(whitened_run["modes"][-1], s, rtol=1e-2)


def test_whitened_digits_reach_the_least_squares_loss(whitened, whitened_run):
    floor = float(whitened.irreducible_loss)
    assert float(whitened_run.final_loss) == pytest.approx(floor, rel=1e-3)
    gf.testing.assert_loss_decreases(whitened_run)


def test_raw_digits_finish_with_decreasing_loss_and_kept_laws(digits):
    built = gf.Problem.from_data(*digits)
    net = gf.initialize.balanced(0, WIDTHS, 1e-2)
    traj = gf.simulate(gf.GradientFlow(built), net, 100.0, method=gf.Method(atol=1e-12))
    assert traj.status is gf.Status.REACHED_END
    gf.testing.assert_loss_decreases(traj)
    gf.testing.assert_conserved(traj, 1e-5)
    gf.testing.assert_nilpotent(traj.final)
    assert float(traj.final_loss) < 0.5 * float(traj.loss[0])


def test_weights_on_pixels_that_are_always_zero_do_not_move(digits):
    dead = np.flatnonzero(~digits.X.any(axis=0))
    assert len(dead) == 3
    flow = gf.GradientFlow(gf.Problem.from_data(*digits))
    rate = flow.vector_field(0.0, gf.initialize.gaussian(0, WIDTHS, 0.5))
    assert not np.asarray(rate.weights[0])[:, dead].any()
    assert np.asarray(rate.weights[0]).any()


def test_hierarchy_is_a_tree_whose_broad_distinctions_are_stronger():
    X, Y = gf.datasets.hierarchy()
    items, properties = gf.datasets.HIERARCHY_ITEMS, gf.datasets.HIERARCHY_PROPERTIES
    assert X.shape == (8, 8)
    assert Y.shape == (8, len(properties)) == (8, 17)
    np.testing.assert_array_equal(X, np.eye(8))
    assert Y[items.index("robin"), properties.index("flies")] == 1
    assert Y[items.index("oak"), properties.index("moves")] == 0
    # One level each: all, animal/plant, the two splits below, the four single items.
    strengths = np.asarray(gf.Problem.from_data(X, Y).singular_values)
    groups = strengths[[0, 1, 2, 4]]
    assert np.all(np.diff(groups) < -0.05)
    np.testing.assert_allclose(strengths[2:4], strengths[2], rtol=1e-12)
    np.testing.assert_allclose(strengths[4:], strengths[4], rtol=1e-12)
    # Every item differs from every other.
    assert len({tuple(row) for row in Y}) == 8
