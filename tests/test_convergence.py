"""Every trajectory descends to a critical value of its loss: fifty random problems."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradflow as gf
from cases import SAVES, explicit

# (widths, coloured inputs, number of problems): all depths from 1 to 5, fifty problems in all.
FAMILIES = [
    ((4, 3), False, 7),
    ((3, 2, 4), False, 9),
    ((4, 3, 5, 3), True, 9),
    ((3, 3, 3, 3, 3), False, 8),
    ((3, 4, 2, 3, 4, 3), False, 9),
    ((4, 5, 3), True, 8),
]
GRADIENT = 1e-6


def rotation(rng, d):
    return np.linalg.qr(rng.standard_normal((d, d)))[0]


def make_family(widths, coloured, count):
    """Targets, covariances and starts, stacked; singular values in the whitened frame known."""
    rng = np.random.default_rng(sum(widths) + coloured)
    d_out, d_in = widths[-1], widths[0]
    rank = min(d_in, d_out)
    starts = [
        gf.initialize.balanced(int(seed), widths, 0.4)
        if seed % 2
        else gf.initialize.gaussian(int(seed), widths, 0.9)
        for seed in rng.integers(0, 1000, count)
    ]
    targets, covariances, values = [], [], []
    for start in starts:
        # Gaps keep the rate of convergence away from 0.
        s = np.sort(0.6 + 0.5 * np.arange(rank) + 0.3 * rng.uniform(size=rank))[::-1]
        diagonal = np.zeros((d_out, d_in))
        diagonal[range(rank), range(rank)] = s
        Q = rotation(rng, d_in)
        root = Q @ np.diag(rng.uniform(0.7, 1.3, d_in)) @ Q.T if coloured else np.eye(d_in)
        target = rotation(rng, d_out) @ diagonal @ rotation(rng, d_in).T @ root
        if d_in == d_out == min(widths) == 3:
            # A balanced square map keeps the sign of its determinant: with the other sign it
            # would end at a saddle, as slowly as a power of t.
            W = np.asarray(start.end_to_end())
            target *= np.sign(np.linalg.det(W) * np.linalg.det(target))
        targets.append(target)
        covariances.append(root @ root)
        values.append(s)
    return (
        jnp.asarray(np.stack(targets)),
        jnp.asarray(np.stack(covariances)),
        jax.tree.map(lambda *w: jnp.stack(w), *starts),
        values,
    )


@functools.cache
def runs(family):
    _, coloured, count = family
    targets, covariances, starts, values = make_family(*family)

    def one(target, covariance, start):
        problem = gf.Problem(target, covariance) if coloured else gf.Problem(target)
        return gf.simulate(
            gf.GradientFlow(problem),
            start,
            500.0,
            save=np.concatenate([[0.0], np.geomspace(0.01, 500.0, SAVES - 1)]),
            method=explicit(1e-9, max_steps=50_000),
            stop_gradient_norm=GRADIENT,
            save_states=False,
        )

    batch = jax.vmap(one)(targets, covariances, starts)
    return [batch.lane(i) for i in range(count)], values


# A family of every other kind by default: each is a program of its own.
families = pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[pytest.mark.slow] * (i % 2), id="-".join(map(str, family[0])))
        for i, family in enumerate(FAMILIES)
    ],
)


def test_there_are_fifty_problems_of_all_depths_from_one_to_five():
    assert sum(count for *_, count in FAMILIES) == 50
    assert {len(widths) - 1 for widths, *_ in FAMILIES} == {1, 2, 3, 4, 5}
    assert {coloured for _, coloured, _ in FAMILIES} == {True, False}


@families
def test_loss_decreases_at_every_saved_time(family):
    for traj in runs(family)[0]:
        loss = np.asarray(traj.loss)
        # Round-off of a sum of squares of the size of the first loss.
        assert np.all(np.diff(loss) <= 1e-14 * loss[0])
        # While there is a gradient, strictly.
        far = np.asarray(traj["gradient_norm"])[:-1] > 1e-3
        assert np.all(np.diff(loss)[far] < 0)
        assert far.sum() > 5


@families
def test_loss_converges_to_a_critical_value(family):
    widths = family[0]
    trajectories, values = runs(family)
    for traj, s in zip(trajectories, values, strict=True):
        assert traj.status is gf.Status.STATIONARY
        assert float(traj.final_gradient_norm) <= GRADIENT
        sizes = range(min(*widths, len(s)) + 1)
        critical = [
            0.5 * (np.sum(s**2) - np.sum(s[list(S)] ** 2))
            for size in sizes
            for S in itertools.combinations(range(len(s)), size)
        ]
        # The loss exceeds the value by at most |gradient|²/2μ, with rates μ above 0.05 here.
        excess = float(traj.final_loss) - np.array(critical)
        assert np.abs(excess).min() < GRADIENT**2 / (2 * 0.05) + 1e-13
        # A generic start misses all saddles: the value is the global minimum's.
        assert np.argmin(np.abs(excess)) == np.argmin(critical)
