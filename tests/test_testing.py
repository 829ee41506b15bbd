"""The assertions for users' own tests: they pass, and fail with the law, size and tolerance."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

import gradflow as gf
from cases import PROBLEMS, TARGET, arrays, problem, run, start


class Broken(gf.LinearNetwork):
    """A network whose adjacency matrix has an entry that it must not have."""

    def adjacency(self):
        return self.power(1).at[self.row, 0].set(1e-300)

    row = 0


def doctored(**changes):
    """The whitened run with other recorded observables."""
    traj = run("whitened")
    return eqx.tree_at(lambda t: t.recorded, traj, {**traj.recorded, **changes})


@pytest.mark.parametrize("kind", PROBLEMS)
def test_good_runs_pass(kind):
    gf.testing.assert_conserved(run(kind), 1e-7)
    gf.testing.assert_loss_decreases(run(kind))
    gf.testing.assert_nilpotent(run(kind))
    gf.testing.assert_nilpotent(run(kind).final)


def test_broken_law_is_named_with_drift_time_and_tolerance():
    drift = run("whitened")["law_drift"].at[7, 1].set(0.25)
    traj = doctored(law_drift=drift)
    with pytest.raises(AssertionError, match=r"law C_2 drifted by 0\.25 at t = 0\.7, tolerance 1e"):
        gf.testing.assert_conserved(traj, 1e-6)
    gf.testing.assert_conserved(traj, 0.3)


def test_all_laws_beyond_the_tolerance_are_listed():
    with pytest.raises(AssertionError, match=r"laws beyond it: C_1, C_2; solver Tsit5"):
        gf.testing.assert_conserved(run("whitened"), 1e-15)


def test_nan_drift_is_a_failure():
    drift = run("whitened")["law_drift"].at[3, 0].set(jnp.nan)
    with pytest.raises(AssertionError, match="C_1"):
        gf.testing.assert_conserved(doctored(law_drift=drift), 1e-6)


def test_rising_loss_is_named_with_size_times_and_tolerance():
    loss = run("whitened").loss
    traj = doctored(loss=loss.at[8].set(loss[7] + 0.5))
    with pytest.raises(
        AssertionError,
        match=r"rose by 0\.5 from .* at t = 0\.7 to .* at t = 0\.8, tolerance .*\(1 ",
    ):
        gf.testing.assert_loss_decreases(traj)


def test_nan_loss_is_a_failure():
    traj = doctored(loss=run("whitened").loss.at[5].set(jnp.nan))
    with pytest.raises(AssertionError, match="loss"):
        gf.testing.assert_loss_decreases(traj)


def test_round_off_in_the_loss_is_allowed_up_to_the_tolerance():
    loss = run("whitened").loss
    traj = doctored(loss=loss.at[-1].set(loss[-2] + 1e-9 * loss[0]))
    gf.testing.assert_loss_decreases(traj, rtol=1e-8)
    with pytest.raises(AssertionError, match="rose"):
        gf.testing.assert_loss_decreases(traj, rtol=1e-10)


def test_entry_off_the_block_pattern_is_named_however_small():
    with pytest.raises(AssertionError, match=r"entry of size 1e-300 off its block pattern"):
        gf.testing.assert_nilpotent(Broken(start().weights))


def test_rising_descent_is_caught():
    descent = gf.descend(gf.GradientFlow(problem("whitened")), start(), 2.0, 40)
    with pytest.raises(AssertionError, match="the loss rose by"):
        gf.testing.assert_loss_decreases(descent)
    with pytest.raises(AssertionError, match="drifted by"):
        gf.testing.assert_conserved(descent, 1e-6)


def test_critical_points_pass_and_others_are_named_with_layer_norm_and_tolerance():
    built = problem("whitened")
    gf.testing.assert_critical(built, gf.initialize.from_product(TARGET, (4, 3, 3)), atol=1e-12)
    gf.testing.assert_critical(built, gf.LinearNetwork([np.zeros((3, 4)), np.zeros((3, 3))]))
    rates = arrays(gf.GradientFlow(built).vector_field(0.0, start()))
    norms = [np.linalg.norm(rate) for rate in rates]
    worst = int(np.argmax(norms))
    message = rf"gradient of layer {worst + 1} has norm {norms[worst]:.3g}, tolerance 1e-08"
    with pytest.raises(AssertionError, match=message):
        gf.testing.assert_critical(built, start())
    gf.testing.assert_critical(built, start(), atol=1.01 * norms[worst])


def test_one_layer_has_no_law_to_break():
    flow = gf.GradientFlow(problem("whitened"))
    traj = gf.descend(flow, gf.LinearNetwork([TARGET / 2]), 0.02, 40)
    gf.testing.assert_conserved(traj, 0.0)
    assert traj["law_drift"].shape == (41, 0)
    np.testing.assert_array_equal(traj["drift"], 0)


def test_laws_of_other_flows_are_named_by_their_number():
    flow = gf.DeltaNetworkFlow(gf.Problem(np.diag([1.0, -1.0])))
    net = gf.delta.DeltaNetwork.random(0, 2, 2, scale=0.3)
    traj = gf.simulate(flow, net, 0.5, save=3, method=gf.Method(solver="explicit"))
    with pytest.raises(AssertionError, match=r"law number [12] drifted by"):
        gf.testing.assert_conserved(traj, atol=0)
