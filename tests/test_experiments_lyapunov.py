"""Lyapunov exponents of deep products: the mathematics that the figures show."""

import functools

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.figure import Figure

import gradflow as gf
from experiments import (
    activation_gallery,
    convergence,
    delta_exponents,
    filtration,
    gaussian_spectrum,
    residual_effect,
    residual_threshold,
    stationary_measures,
    trained_jacobians,
)


@pytest.fixture(autouse=True)
def no_figure_is_left_over():
    yield
    plt.close("all")


def drawn(module, data):
    with gf.plot.style():
        figure = module.figure(data)
    assert isinstance(figure, Figure)
    figure.canvas.draw()
    return figure


@functools.cache
def gaussian():
    config = gaussian_spectrum.Config(dimensions=(2, 4), sigma=1.5, steps=300, chains=256)
    return gaussian_spectrum.compute(config)


def test_gaussian_spectra_are_sampled_within_their_errors_of_the_closed_form():
    data = gaussian()
    # γ_1 + … + γ_d = E log |det|: the squared determinant is a product of χ² of 1 to d degrees.
    for d in (2, 4):
        pieces = np.random.default_rng(0).chisquare(np.arange(1, d + 1), (400_000, d))
        total = d * np.log(1.5 / np.sqrt(d)) + 0.5 * np.log(pieces).sum(axis=1).mean()
        np.testing.assert_allclose(data["closed_form"].sel(d=d).sum(), total, atol=0.02)
    assert float(abs(gaussian_spectrum.deviations(data)).max()) < 4
    assert float(data["standard_error"].max()) < 0.02
    # The narrow spectrum has no third exponent.
    assert np.isnan(data["exponent"].sel(d=2, k=[3, 4])).all()


def test_gaussian_spectra_are_told_and_drawn():
    text = gaussian_spectrum.summary(gaussian())
    assert text.count("standard errors at most") == 2
    left, right = drawn(gaussian_spectrum, gaussian()).axes
    # What was sampled of d = 2 and 4, on top of the lines of the closed form.
    assert sorted(len(line.get_xdata()) for line in left.lines) == [2, 2, 4, 4, 400]
    low, high = right.get_ylim()
    assert low < float(gaussian_spectrum.deviations(gaussian()).min()) < high


@functools.cache
def effect():
    config = residual_effect.Config(dimension=2, scales=6, points=81, steps=400, smallest=0.3)
    return residual_effect.compute(config)


def test_a_residual_connection_helps_below_the_threshold_and_harms_above_it():
    data = effect()
    ((low, high),) = residual_effect.intervals(data, 1)
    assert low == pytest.approx(1.134866, rel=1e-3)
    assert high == data["fine_sigma"][-1]
    decided, right = residual_effect.agreement(data)
    assert decided == right >= 8
    verdict = data["verdict"].sel(k=1)
    assert verdict.values[0] == "shrank"
    assert verdict.sel(sigma=2, method="nearest") == "grew"
    # The samples lie on the curves that are drawn through them.
    off = data["closed_form"].interp(fine_sigma=data["sigma"]) - data["exponent"]
    assert float(abs(off).max()) < 0.02


def test_the_largest_residual_exponent_is_never_negative():
    data = effect().sel(shortcut="residual", k=1)
    assert np.all(data["closed_form"] >= 0)
    assert np.all(data["exponent"] > -4 * data["standard_error"])


def test_effects_are_told_and_drawn_with_their_shaded_regions():
    text = residual_effect.summary(effect())
    assert "|γ_1| grows for σ from 1.13" in text
    figure = drawn(residual_effect, effect())
    for k, ax in zip((1, 2), figure.axes, strict=True):
        assert len(ax.patches) == len(residual_effect.intervals(effect(), k))


@functools.cache
def thresholds():
    config = residual_threshold.Config(widths=8, sampled=(2,), steps=200, chains=128)
    return residual_threshold.compute(config)


def test_the_threshold_falls_to_its_limit_like_one_over_the_width():
    data = thresholds()
    assert float(data["threshold"][0]) == pytest.approx(1.134866, abs=1e-6)
    assert np.all(np.diff(data["threshold"]) < 0)
    sigma = data.attrs["limit"]
    assert 1 + sigma**2 == pytest.approx(sigma**-2)
    gap = data["threshold"] - sigma
    slope = np.diff(np.log(gap[-2:]))[0] / np.diff(np.log(data["d"][-2:]))[0]
    assert slope == pytest.approx(-1, abs=0.02)


def test_sampled_exponents_find_the_same_threshold():
    data = thresholds()
    off = abs(data["sampled"] - data["exact_at_sampled"])
    assert np.all(off < 4 * data["standard_error"])
    assert np.all(data["standard_error"] < 0.01)
    assert "standard errors off the closed form" in residual_threshold.summary(data)
    left, right = drawn(residual_threshold, data).axes
    assert left.get_ylim()[1] > 1.134
    np.testing.assert_allclose(left.lines[0].get_ydata(), data["threshold"])
    assert np.all(right.lines[0].get_ydata() > 0)


@functools.cache
def deltas():
    config = delta_exponents.Config(dimension=2, betas=13, points=31, steps=100, chains=64)
    return delta_exponents.compute(config)


def test_exponents_of_delta_products_sum_to_the_logarithm_of_the_determinant():
    data = deltas()
    rule = np.log(
        np.abs(1 - data["beta"].values), where=data["beta"] != 1, out=np.full(13, -np.inf)
    )
    np.testing.assert_allclose(data["exponent"].sum("k"), rule, atol=1e-12)
    np.testing.assert_allclose(
        data["fine_closed_form"].sum("k")[:5], np.log(1 - data["fine_beta"][:5])
    )


def test_delta_products_vanish_between_keeping_and_reflecting():
    data = deltas()
    top = data["exponent"].isel(k=0)
    beta = data["beta"]
    assert np.all(top.where((beta > 0) & (beta < 2), -1) < 0)
    assert np.all(top.where((beta < 0) | (beta > 2), 1) > 0)
    np.testing.assert_allclose(data["exponent"].sel(beta=[0, 2]), 0, atol=1e-12)
    assert data["exponent"].sel(beta=1, k=2) == -np.inf
    off = abs(data["exponent"] - data["closed_form"]).sel(k=1)
    assert np.all(off < 4.5 * data["standard_error"].sel(k=1) + 1e-12)
    assert "(γ_2 = −∞) at β = 1" in delta_exponents.summary(data)
    drawn(delta_exponents, data)


@functools.cache
def growth():
    return filtration.compute(filtration.Config(steps=120, chains=32, rate_steps=300))


def test_the_invariant_subspace_is_found_from_the_matrices():
    data = growth()
    assert data["level_dimension"].values.tolist() == [4, 2]
    assert data.attrs["subspace_error"] < 1e-9
    # The block alone, without any filtration.
    config = filtration.Config()
    blocks = np.asarray(filtration.law(config).matrices)[:, :2, :2]
    alone = gf.lyapunov.stationary_measure(gf.lyapunov.Finite(blocks), 500)
    assert float(data["level_rate"][1]) == pytest.approx(alone.exponent, abs=0.01)


def test_starts_grow_at_the_rate_of_the_subspace_they_lie_in():
    data = growth()
    high, low = data["level_rate"].values
    assert high - low > 0.3
    np.testing.assert_array_equal(data["rate"], [high, low, high])
    np.testing.assert_allclose(filtration.fitted_rates(data)[:2], [high, low], atol=0.06)
    # Almost inside: the lower rate first, the higher one late.
    depth, near = data["depth"], data["growth"].sel(start="almost inside")
    turn = filtration.overtaking(data)
    early, late = (depth < 0.6 * turn), (depth > 1.3 * turn)
    slopes = [np.polyfit(depth[x], near[x], 1)[0] for x in (early, late)]
    np.testing.assert_allclose(slopes, [low, high], atol=0.15)


def test_growth_is_told_and_drawn_along_the_predicted_slopes():
    text = filtration.summary(growth())
    assert text.count("predicted") == 3
    (ax,) = drawn(filtration, growth()).axes
    straight = [line for line in ax.lines if line.get_color() == "black"]
    for line, rate in zip(straight, growth()["level_rate"].values, strict=True):
        np.testing.assert_allclose(line.get_ydata() / line.get_xdata(), rate)


@functools.cache
def errors():
    return convergence.compute(convergence.Config(word_length=7, steps=1000, chains=16))


def test_methods_converge_at_their_orders_and_the_determinant_faster_than_any():
    data = errors()
    assert data.attrs["exponent"] == pytest.approx(1.14331103510294924584, abs=1e-15)
    slopes = convergence.orders(data)
    assert slopes["sampled"] == pytest.approx(-0.5, abs=0.2)
    assert slopes["linear"] == pytest.approx(-2, abs=0.4)
    assert slopes["ulam"] < -0.8
    # The gain of one more letter grows with the length.
    gains = -np.diff(np.log10(data["word_error"]))
    assert np.all(np.diff(gains) > 0)
    assert float(data["word_error"][-1]) < 1e-20


def test_convergence_is_told_and_drawn():
    text = convergence.summary(errors())
    assert "γ₁ = 1.143311035102949" in text
    (ax,) = drawn(convergence, errors()).axes
    assert len(ax.get_legend().get_texts()) == 4


@functools.cache
def measures():
    config = stationary_measures.Config(bins=360, samples=4000, burn_in=60)
    return stationary_measures.compute(config)


def test_directions_of_deep_products_have_the_stationary_law():
    data = measures()
    widths = np.diff(data["edge"].values)
    np.testing.assert_allclose(stationary_measures.coarse(data) @ widths, 1)
    np.testing.assert_allclose(data["histogram"].values @ widths, 1)
    # Kolmogorov and Smirnov: 1.63/√n at a level of 1 %, and the width of the cells.
    assert np.all(stationary_measures.distances(data) < 1.63 / np.sqrt(4000) + 0.02)


def test_integrals_over_stationary_measures_are_exponents():
    exponent = measures()["exponent"].values
    matrices = stationary_measures.laws()["two positive matrices"].matrices
    exact = gf.lyapunov.determinant(np.asarray(matrices), [0.5, 0.5], 8)
    assert exponent[0, 0] == pytest.approx(float(exact), abs=1e-4)
    # The mean of log |Au| over all angles is the logarithm of half the sum of singular values.
    assert exponent[1, 0] == pytest.approx(np.log((2 + 0.5) / 2), abs=1e-3)
    # Triangular: the means of the logarithms on the diagonal.
    diagonals = [[1.4, 1.1], [0.6, 0.8]]
    np.testing.assert_allclose(exponent[3], np.log(diagonals).mean(axis=1), atol=1e-3)


def test_a_line_that_all_keep_has_a_measure_of_its_own():
    data = measures()
    assert np.isfinite(data["exponent"]).sum("measure").values.tolist() == [1, 1, 1, 2]
    assert np.isfinite(data["invariant_line"]).sum("line").values.tolist() == [0, 0, 0, 1]
    assert float(data["invariant_line"][3, 0]) == 0
    assert stationary_measures.summary(data).count("NOT unique") == 1
    figure = drawn(stationary_measures, data)
    assert [len(ax.lines) for ax in figure.axes] == [0, 0, 0, 2]


@functools.cache
def gallery():
    config = activation_gallery.Config(
        dimension=4, scales=5, edge_scales=4, refined=2, points=17, steps=150, chains=48
    )
    return activation_gallery.compute(config)


def test_orbits_of_small_tanh_layers_vanish_and_leave_the_exponent_at_zero():
    off = activation_gallery.vanishing(gallery())["deviation"]
    assert np.isfinite(off).sum("sigma").values.tolist() == [3, 0, 2]
    assert float(abs(off).max()) < 4
    assert float(gallery()["standard_error"].max()) < 0.03


def test_narrow_tanh_layers_have_no_edge_of_chaos_where_wide_ones_have():
    data = gallery()
    first, _ = activation_gallery.crossing(data["fine_edge"].values, data["edge_at_zero"].values)
    # Newman's closed form is 0 at σ = √d exp(−½(log 2 + ψ(d/2))), ψ(2) = 1 − 0.5772….
    assert first == pytest.approx(2 * np.exp(-0.5 * (np.log(2) + 1 - np.euler_gamma)), abs=1e-4)
    # Of wide ones χ_1 = 1 at σ = 1, which is seen the more sharply the deeper they are.
    deep = activation_gallery.Config(steps=2000)
    below, above = activation_gallery.mean_field(deep, "tanh", "none", np.array([0.98, 1.02]))
    assert below == pytest.approx(np.log(0.98), abs=1e-3)
    assert 0 < above < 0.01
    later = data.sel(edge_sigma=data["edge_sigma"] > first)
    assert later.sizes["edge_sigma"] >= 2
    assert np.all(later["edge_exponent"] < -4 * later["edge_error"])


def test_grown_states_of_smooth_relu_layers_know_two_slopes_only():
    data = gallery()
    one = data.sel(activation="smooth ReLU", shortcut="none").isel(sigma=-1)
    exact = one["at_infinity"].values[-1]
    # By simulation of numbers, not of matrices.
    g = np.random.default_rng(0).standard_normal((400_000, 4))
    g = np.where(g > 0, g, data.attrs["leak"] * g)
    drawn_by_hand = np.log(2 * np.linalg.norm(g, axis=1))  # σ/√d = 2
    assert exact == pytest.approx(drawn_by_hand.mean(), abs=0.005)
    assert abs(float(one["exponent"]) - exact) < 4 * float(one["standard_error"])


def test_layers_of_slope_one_are_linear_with_and_without_shortcuts():
    config = activation_gallery.Config(dimension=4, steps=150, chains=48, leak=1.0, beta=0.7)
    sigma = np.array([0.5, 2.0])
    for seed, shortcut in enumerate(activation_gallery.SHORTCUTS):
        known = activation_gallery.at_zero(config, "smooth ReLU", shortcut, sigma)
        for s, value in zip(sigma, known, strict=True):
            run = activation_gallery.sample(config, seed, "smooth ReLU", shortcut, s)
            assert abs(float(run.exponents[0]) - value) < 4 * float(run.standard_error[0])
    # Mean fields of infinitely wide linear layers.
    wide = activation_gallery.Config(dimension=10**9, leak=1.0)
    for shortcut, value in (("none", np.log(sigma)), ("residual", 0.5 * np.log1p(sigma**2))):
        found = activation_gallery.mean_field(wide, "smooth ReLU", shortcut, sigma)
        np.testing.assert_allclose(found, value, atol=1e-6)


@pytest.mark.parametrize(
    ("activation", "shortcut", "sigma"),
    [("tanh", "none", 2.0), ("smooth ReLU", "none", 1.0), ("smooth ReLU", "residual", 0.7)],
)
def test_mean_fields_are_those_of_wide_networks(activation, shortcut, sigma):
    config, d = activation_gallery.Config(dimension=10**9, steps=30, burn_in=10), 300
    found = []
    for seed in range(24):
        rng = np.random.default_rng(seed)
        # Means of entries 0, overlap 0.1, as the mean field starts.
        frame = np.stack([np.ones(d), *rng.standard_normal((2, d))], axis=1)
        _, x, other = np.sqrt(d) * np.linalg.qr(frame)[0].T
        v, total = 0.1 * x + np.sqrt(0.99) * other, 0.0
        for step in range(config.burn_in + config.steps):
            W = sigma / np.sqrt(d) * rng.standard_normal((d, d))
            u, before = W @ x, np.linalg.norm(v)
            if activation == "tanh":
                phi, slope = np.tanh(u), 1 / np.cosh(u) ** 2
            else:
                phi = config.leak * u + (1 - config.leak) * np.logaddexp(0, u)
                slope = config.leak + (1 - config.leak) * (1 + np.tanh(u / 2)) / 2
            x, v = (shortcut != "none") * np.array([x, v]) + np.array([phi, slope * (W @ v)])
            total += np.log(np.linalg.norm(v) / before) * (step >= config.burn_in)
        found.append(total / config.steps)
    wide = activation_gallery.mean_field(config, activation, shortcut, np.array([sigma]))[0]
    error = np.std(found, ddof=1) / np.sqrt(len(found))
    assert error < 0.02
    assert abs(np.mean(found) - wide) < 4 * error


def test_one_program_has_the_law_of_layers_with_shortcuts_of_the_library():
    config = activation_gallery.Config(dimension=4, steps=150, chains=48)
    plain = activation_gallery.ensemble(config, "tanh", "none", 1.0)
    for seed, (shortcut, wrapped) in enumerate(
        {"residual": gf.lyapunov.residual(plain), "delta": gf.lyapunov.delta(plain, 1.0)}.items()
    ):
        one = activation_gallery.sample(config, seed, "tanh", shortcut, 1.0)
        other = gf.lyapunov.exponents(
            seed + 7, wrapped, config.steps, 1, burn_in=config.burn_in, chains=config.chains
        )
        error = np.hypot(one.standard_error[0], other.standard_error[0])
        assert abs(float(one.exponents[0] - other.exponents[0])) < 4 * error
        assert error < 0.02


def test_the_gallery_is_told_and_drawn_with_its_edges():
    data = gallery()
    text = activation_gallery.summary(data)
    assert "γ₁ is positive nowhere that was sampled" in text
    assert text.count("rises through 0") >= 2
    figure = drawn(activation_gallery, data)
    axes = figure.axes[:6]
    for ax, where in zip(axes, data["zero"].values.ravel(), strict=True):
        marks = [line for line in ax.lines if line.get_linestyle() == ":"]
        assert [line.get_xdata()[0] for line in marks] == [where] * bool(np.isfinite(where))


@functools.cache
def trained():
    config = trained_jacobians.Config(
        strengths=(2.0, 1.0),
        layers=5,
        end=60.0,
        saves=12,
        sampled=3,
        steps=150,
        chains=64,
        probes=512,
    )
    return trained_jacobians.compute(config)


def test_training_takes_the_exponents_of_layers_in_order_to_those_of_the_target():
    data = trained()
    np.testing.assert_allclose(data["target"], np.log([2, 1]) / 5)
    assert np.all(data["loss"][:, -1] < 1e-12)
    end = data["in_order"].isel(time=-1)
    np.testing.assert_allclose(end, np.tile(data["target"], (3, 1)), atol=1e-6)
    # They were elsewhere.
    assert np.all(abs(data["in_order"].isel(time=0) - data["target"]).max("k") > 0.05)


def test_shuffled_layers_keep_the_sum_of_the_exponents_only():
    data = trained()
    in_order = data["in_order"].sel(time=data["sampled_time"].values)
    off = data["shuffled"].sum("k").values - in_order.sum("k").values
    assert np.all(abs(off) < 4 * data["shuffled_error"].sum("k") + 1e-12)
    # Not each exponent.
    single = (data["shuffled"].values - in_order.values) / data["shuffled_error"].values
    assert abs(single).max() > 10


def test_gradients_of_trained_layers_are_those_of_the_target():
    data = trained()
    u = np.random.default_rng(0).standard_normal((2, 400_000))
    u /= np.linalg.norm(u, axis=0)
    by_hand = np.log(np.hypot(2 * u[0], u[1]))
    assert float(data["target_gradient"]) == pytest.approx(by_hand.mean(), abs=2e-3)
    end = data.sel(moment="end", layer=0)
    off = abs(end["log_norm"] - data["target_gradient"])
    assert np.all(off < 4 * end["spread"] / np.sqrt(data.attrs["probes"]))


def test_gradients_of_untrained_layers_are_as_far_from_the_prediction_as_shuffled_ones():
    data = trained()
    assert np.all(abs(trained_jacobians.deviation(data).sel(moment="start")) < 3)
    # The prediction is made from shuffled layers.
    for moment, i in (("start", 0), ("end", -1)):
        one = data.sel(moment=moment)
        off = one["predicted_rate"] - data["shuffled"][:, i, 0]
        error = np.hypot(one["predicted_error"], data["shuffled_error"][:, i, 0])
        assert np.all(abs(off) < 4 * error)


def test_trained_layers_are_told_and_drawn():
    text = trained_jacobians.summary(trained())
    assert text.count("all modes learnt") == 3
    figure = drawn(trained_jacobians, trained())
    for ax, kind in zip(figure.axes[:3], trained()["kind"].values, strict=True):
        assert ax.get_title() == f"{kind}: all modes learnt"
    # The star lies at the end of the line of the trained network.
    for ax in figure.axes[3:]:
        assert ax.lines[-1].get_ydata()[0] == pytest.approx(ax.lines[-2].get_ydata()[0], abs=0.1)
