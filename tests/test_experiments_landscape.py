"""Experiments on the loss landscape: what each figure claims, on small configurations."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
import xarray as xr
from matplotlib.figure import Figure

from experiments import critical_point_atlas, fibre_walk, signature_lattice, strict_or_not


@pytest.fixture(autouse=True)
def no_figure_is_left_over():
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def atlas():
    config = critical_point_atlas.Config(singular_values=(3.0, 2.0, 1.0), hidden_width=4, draws=2)
    return critical_point_atlas.compute(config)


@pytest.fixture(scope="module")
def lattice():
    config = signature_lattice.Config(singular_values=(3.0, 2.0, 1.0), hidden_width=3, points=21)
    return signature_lattice.compute(config)


@pytest.fixture(scope="module")
def fibre():
    return strict_or_not.compute(strict_or_not.Config(points=31))


@pytest.fixture(scope="module")
def walks():
    return fibre_walk.compute(fibre_walk.Config(walks=3, steps=12))


def test_the_atlas_holds_every_signature_with_its_value_and_a_settled_kind(atlas):
    # Three places of 8 signatures each, and from three layers on of 7 open ones beside.
    assert atlas.attrs["agreed"] == atlas.attrs["points"] == 3 * (8 + 15 + 15)
    values = atlas["value"].to_series()
    assert values["∅"] == pytest.approx(7.0)
    assert values["{1,3}"] == pytest.approx(2.0)
    assert values["{1,2,3}"] == pytest.approx(0.0)


def test_tightened_points_have_one_negative_eigenvalue_per_exchange_for_a_stronger_mode(atlas):
    tight = atlas["index"].sel(pivots="tightened", depth=3)
    assert np.all(tight.sel(signature=["{3}", "{2,3}", "{1,3}", "{1,2}"]) == [[2], [2], [1], [0]])
    assert critical_point_atlas.off_theory(atlas) == 0
    assert critical_point_atlas.off_theory(atlas.assign(exchanges=atlas["exchanges"] + 1)) > 0


def test_saddles_without_negative_curvature_are_the_tightened_ones_of_the_strongest_modes(atlas):
    nonstrict = atlas["kind"] == "nonstrict_saddle"
    first = atlas["signature"].isin(["∅", "{1}", "{1,2}"])
    tight = atlas["pivots"] == "tightened"
    assert bool((nonstrict == (first & tight & (atlas["depth"] > 2))).all())
    strict = atlas["kind"] == "strict_saddle"
    assert float(atlas["smallest_eigenvalue"].where(strict).max()) < -0.1
    assert float(np.abs(atlas["smallest_eigenvalue"].where(nonstrict)).max()) < 1e-10


def test_two_layers_escape_from_the_origin_through_every_mode_and_hidden_unit(atlas):
    assert np.all(atlas["index"].sel(depth=2, signature="∅", pivots="open") == 3 * 4)
    assert atlas["kind"].sel(depth=2, signature="∅", pivots="tightened") == ""


def test_the_atlas_is_a_table_and_a_picture(atlas):
    table = critical_point_atlas.summary(atlas)
    row = next(line for line in table.splitlines() if line.startswith("{1,2} "))
    assert row.count("0 non-strict") == 2
    drawn = critical_point_atlas.figure(atlas)
    assert [ax.get_title() for ax in drawn.axes] == ["2 layers", "3 layers", "4 layers"]
    labels = [text.get_text() for text in drawn.axes[1].texts]
    assert sorted(labels) == sorted(atlas["signature"].values)


def test_the_loss_falls_along_every_arc_of_the_lattice_as_the_closed_form_says(lattice):
    assert lattice.sizes["arc"] == 3 * 2**2
    assert lattice.attrs["longer_arcs"] == 3**3 - 2**3 - 12
    assert float(lattice["loss"].diff("tau").max()) < 0
    assert lattice.attrs["longer_step"] < 0
    assert signature_lattice.deviation(lattice) < 1e-13
    ends = lattice["loss"].isel(tau=[0, -1]).values
    arcs = np.stack([lattice["upper"], lattice["lower"]], axis=1)
    np.testing.assert_allclose(ends, lattice["value"].values[arcs], atol=1e-13)
    np.testing.assert_allclose(ends[:, 0] - ends[:, 1], lattice["drop"], atol=1e-13)


def test_only_the_strongest_modes_are_non_strict_in_the_lattice(lattice):
    kinds = lattice["kind"].to_series()
    assert set(kinds[kinds == "nonstrict_saddle"].index) == {"∅", "{1}", "{1,2}"}
    assert list(kinds[kinds == "global_minimum"].index) == ["{1,2,3}"]
    drawn = signature_lattice.figure(lattice)
    assert len(drawn.axes[0].collections[0].get_segments()) == lattice.sizes["arc"]
    assert "12 arcs that add one mode" in signature_lattice.summary(lattice)


def test_one_critical_value_has_strict_and_non_strict_networks(fibre):
    assert fibre["kind"].values.tolist() == ["strict_saddle", *["nonstrict_saddle"] * 2]
    np.testing.assert_allclose(fibre["loss"], 2.5, rtol=1e-14)
    assert strict_or_not.counts(fibre)[:, 0].tolist() == [2, 0, 0]
    smallest = fibre["eigenvalues"][:, 0].values
    # Two open layers at 3^{1/4} each, and the residual 2 between the two that must move.
    assert smallest[0] == pytest.approx(-2 * np.sqrt(3))
    assert np.abs(smallest[1:]).max() < 1e-12
    assert "3 of them equal in end-to-end map" in fibre.attrs["runs"]


def test_the_loss_falls_at_the_order_of_the_layers_that_must_move(fibre):
    assert fibre["order"].values.tolist() == [2, 3, 4]
    assert fibre["predicted_order"].values.tolist() == [2, 3, 4]
    np.testing.assert_allclose(strict_or_not.slopes(fibre), [2, 3, 4], rtol=1e-3)
    # At the tightened point k = h blocks of length 1/√h each meet the residual s_2 = 2.
    tau = fibre["tau"].values[0]
    assert float(fibre["fall"][-1, 0]) == pytest.approx(2 * (tau / 2) ** 4, rel=1e-6)
    drawn = strict_or_not.figure(fibre)
    assert len(drawn.axes) == 4
    assert "falls like τ^4.000" in strict_or_not.summary(fibre)


def test_map_and_loss_stay_in_the_fibre_while_the_sharpness_does_not(walks):
    assert float(walks["map_change"].max()) < 1e-12
    assert float(np.abs(walks["loss"]).max()) < 1e-24
    sharp = fibre_walk.sharpness(walks)
    assert float(sharp.max()) > 1.1 * float(sharp[0, 0])
    # The rank of the differential of the product at a map of full rank: all of its entries.
    assert np.all(fibre_walk.positive(walks) == 9)
    assert "3 end at a global minimum" in walks.attrs["runs"]


def test_no_place_of_the_fibre_is_less_sharp_than_the_balanced_minimum(walks):
    least = 3 * 3.0 ** (4 / 3)
    assert walks.attrs["lowest_sharpness"] == pytest.approx(least, rel=1e-14)
    sharp = fibre_walk.sharpness(walks)
    np.testing.assert_allclose(sharp[:, 0], least, rtol=1e-12)
    assert np.all(sharp[:, 1:] > (1 + 1e-6) * least)
    assert isinstance(fibre_walk.figure(walks), Figure)
    assert "sharpness at the start 12.98" in fibre_walk.summary(walks)


@pytest.mark.parametrize("name", ["atlas", "lattice", "fibre", "walks"])
def test_the_data_can_be_stored(name, request, tmp_path):
    data = request.getfixturevalue(name)
    data.to_netcdf(tmp_path / "data.nc", engine="netcdf4")
    xr.testing.assert_identical(xr.load_dataset(tmp_path / "data.nc"), data)
