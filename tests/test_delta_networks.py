"""Gradient flow of networks of delta layers and of others, and of branches beside shortcuts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradflow as gf
from cases import TARGET, WIDTHS, arrays, explicit, problem, start

D = gf.delta
SQUARE = (3, 3, 3, 3)


def simulate(flow, state, t1, method, save=5):
    return gf.simulate(flow, state, t1, save=save, method=method)


@pytest.mark.parametrize("covariance", [None, np.diag([2.0, 1.0, 0.5])], ids=["white", "coloured"])
def test_parameter_flow_is_minus_the_gradient_of_its_loss(covariance):
    target = np.random.default_rng(13).standard_normal((3, 3))
    flow = gf.DeltaNetworkFlow(gf.Problem(target, covariance))
    net = D.DeltaNetwork.random(0, 3, 3, scale=0.5, beta=0.7)
    slope = jax.jit(jax.grad(flow.loss))(net)
    rate = flow.vector_field(0.0, net)
    for f, g in zip(jax.tree.leaves(rate), jax.tree.leaves(slope), strict=True):
        np.testing.assert_allclose(f, -g, rtol=1e-12, atol=1e-13)
    # Scale invariance: no motion along a direction's own length.
    np.testing.assert_allclose(jnp.sum(rate.directions * net.directions, axis=1), 0, atol=1e-14)


def delta_run(solver, rtol):
    target = np.diag([1.5, 1.0, -1.0])
    net = D.DeltaNetwork.random(2, 4, 3, scale=0.3)
    method = gf.Method(solver=solver, rtol=rtol, atol=rtol * 1e-2)
    return gf.simulate(gf.DeltaNetworkFlow(gf.Problem(target)), net, 30.0, save=21, method=method)


def test_lengths_of_the_directions_are_conserved_to_solver_tolerance():
    traj = delta_run("explicit", 1e-10)
    gf.testing.assert_conserved(traj, atol=1e-7)
    gf.testing.assert_loss_decreases(traj)
    assert float(jnp.abs(traj.final.directions - traj.network(0).directions).max()) > 0.05


@pytest.mark.parametrize("rtol", [1e-4, 1e-8])
def test_lengths_of_the_directions_are_conserved_to_round_off_by_the_conserving_solver(rtol):
    traj = delta_run("conserving", rtol)
    assert traj.status is gf.Status.REACHED_END
    gf.testing.assert_conserved(traj, atol=1e-12)


def test_solvers_agree_on_a_delta_network():
    tight, other = delta_run("explicit", 1e-10), delta_run("conserving", 1e-8)
    np.testing.assert_allclose(tight["modes"], other["modes"], rtol=0, atol=1e-6)


def test_runs_of_delta_networks_survive_a_file(tmp_path):
    traj = delta_run("conserving", 1e-8)
    again = gf.load(traj.save(tmp_path / "run.nc"))
    assert isinstance(again.final, D.DeltaNetwork)
    for a, b in zip(jax.tree.leaves(traj.states), jax.tree.leaves(again.states), strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(again["gates"], traj["gates"])


# Frozen shortcuts --------------------------------------------------------------------------------


def shortcut_kinds():
    rng = np.random.default_rng(14)
    k = rng.standard_normal((3, 3))
    return {
        "identity": (None, [np.eye(3)] * 3),
        "given": ([rng.standard_normal((3, 3)), None, np.zeros((3, 3))], None),
        "delta": ([D.operator(b, x) for b, x in zip([0.5, 1.0, 2.0], k, strict=True)], None),
    }


@pytest.mark.parametrize(
    "kind",
    [
        "identity",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("delta", "given")),
    ],
)
def test_residual_flow_is_plain_flow_from_a_shifted_start(kind):
    shortcuts, dense = shortcut_kinds()[kind]
    if dense is None:
        dense = [np.eye(3) if s is None else np.asarray(s) for s in shortcuts]
    square = gf.Problem(TARGET[:, :3].copy())
    branches = start(SQUARE, 0.3)
    shifted = gf.LinearNetwork([d + w for d, w in zip(dense, arrays(branches), strict=True)])
    flow = gf.ResidualFlow(square, shortcuts)
    residual = simulate(flow, branches, 3.0, explicit(1e-10))
    plain = simulate(gf.GradientFlow(square), shifted, 3.0, explicit(1e-10))
    for i in (2, -1):
        for w, m, d in zip(
            arrays(residual.network(i)), arrays(plain.network(i)), dense, strict=True
        ):
            np.testing.assert_allclose(w + d, m, rtol=0, atol=1e-8)
    np.testing.assert_allclose(residual["modes"], plain["modes"], rtol=0, atol=1e-8)
    for C, expected in zip(
        flow.conserved(branches), gf.observables.imbalance(shifted), strict=True
    ):
        np.testing.assert_allclose(C, expected, rtol=0, atol=1e-13)
    gf.testing.assert_conserved(residual, atol=1e-7)
    assert gf.observables.independent_laws(branches, flow) == 12


def test_residual_field_is_the_plain_one_at_the_layers():
    shortcuts, _ = shortcut_kinds()["delta"]
    square, branches = gf.Problem(TARGET[:, :3].copy()), start(SQUARE, 0.3)
    flow = gf.ResidualFlow(square, shortcuts)
    layers = [np.asarray(d) + w for d, w in zip(shortcuts, arrays(branches), strict=True)]
    plain = gf.GradientFlow(square).vector_field(0.0, gf.LinearNetwork(layers))
    for f, g in zip(arrays(flow.vector_field(0.0, branches)), arrays(plain), strict=True):
        np.testing.assert_array_equal(f, g)


def test_residual_flow_takes_rectangular_identities_as_the_residual_start_has_them():
    flow = gf.ResidualFlow(problem("whitened"))
    zero = gf.LinearNetwork([np.zeros_like(w) for w in arrays(start())])
    for a, b in zip(
        arrays(flow.effective(zero)), arrays(gf.initialize.identity(WIDTHS)), strict=True
    ):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_residual_flow_keeps_its_laws_to_round_off_with_the_conserving_solver():
    problem = gf.Problem(np.diag([2.0, 1.0, 0.5]))
    traj = gf.simulate(
        gf.ResidualFlow(problem),
        start(SQUARE, 0.2),
        50.0,
        save=5,
        method=gf.Method(solver="conserving", rtol=1e-6),
    )
    gf.testing.assert_conserved(traj, atol=1e-12)
    assert float(traj.final_loss) < 1e-10


SIGNS = np.diag([2.0, 1.5, 1.0, -1.0])


@pytest.mark.slow
def test_residual_networks_stay_at_the_saddle_of_a_negative_eigenvalue_and_delta_networks_do_not():
    problem = gf.Problem(SIGNS)
    flow = gf.ResidualFlow(problem)
    method = gf.Method(rtol=1e-8, atol=1e-12)
    for size in (0.0, 1e-6, 1e-3):
        for seed in range(5):
            noise = np.random.default_rng(seed).standard_normal((6, 4, 4))
            branches = gf.LinearNetwork(list(size * noise))
            traj = gf.simulate(flow, branches, 400.0, save=5, method=method)
            assert float(traj.final_loss) == pytest.approx(0.5, abs=1e-3)
    learnt = 0
    for seed in range(10):
        net = D.DeltaNetwork.random(seed, 6, 4, scale=0.1)
        traj = gf.simulate(gf.DeltaNetworkFlow(problem), net, 400.0, save=5)
        learnt += float(traj.final_loss) < 1e-3
    assert learnt >= 9


@pytest.mark.slow
@pytest.mark.parametrize("name", ["highway", "delta_shortcut"])
def test_parameter_flow_trains_other_layers(name):
    rng = np.random.default_rng(15)
    W, g, k = 0.3 * rng.standard_normal((3, 2, 2)), np.zeros(3), rng.standard_normal((3, 2))
    state = (
        D.HighwayNetwork(W + np.eye(2), g) if name == "highway" else D.DeltaShortcutNetwork(k, g, W)
    )
    traj = simulate(
        gf.ParameterFlow(gf.Problem(np.diag([1.2, 0.7]))), state, 40.0, explicit(1e-8), save=5
    )
    gf.testing.assert_loss_decreases(traj)
    assert float(traj.final_loss) < 1e-6


@pytest.mark.slow
def test_orthogonal_network_learns_a_rotation_and_no_reflection():
    c, s = np.cos(2.0), np.sin(2.0)
    state = D.OrthogonalNetwork(0.1 * np.random.default_rng(16).standard_normal((3, 2, 2)))
    # The rotation nearest to diag(2, −1) is the identity, at ½(1² + 2²); a reflection has ½.
    for target, loss in ((np.array([[c, -s], [s, c]]), 0.0), (np.diag([2.0, -1.0]), 2.5)):
        traj = simulate(gf.ParameterFlow(gf.Problem(target)), state, 40.0, explicit(1e-8), save=5)
        assert float(traj.final_loss) == pytest.approx(loss, abs=1e-6)


@pytest.mark.slow
def test_lanes_of_an_ensemble_are_single_runs():
    flow, method = gf.DeltaNetworkFlow(gf.Problem(np.diag([1.5, 1.0, -1.0]))), explicit(1e-9)
    nets = [D.DeltaNetwork.random(seed, 4, 3, scale=0.3) for seed in range(3)]
    batch = gf.ensemble(flow, nets, 5.0, save=5, method=method)
    for i, net in enumerate(nets):
        single = simulate(flow, net, 5.0, method)
        np.testing.assert_allclose(batch.lane(i)["modes"], single["modes"], rtol=0, atol=1e-7)
        np.testing.assert_allclose(batch.lane(i)["gates"], single["gates"], rtol=0, atol=1e-7)
