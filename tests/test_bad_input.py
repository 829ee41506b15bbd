"""Every bad argument is refused by a ValueError that names it, its value and the remedy."""

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import gradflow as gf
from cases import COVARIANCE, TARGET, WIDTHS, log_cosh, problem, run, start

NAN = np.array([[1.0, np.nan], [0.0, 1.0]])
INF = np.array([[1.0, 0.0], [-np.inf, 1.0]])
X, Y = np.random.default_rng(0).standard_normal((2, 10, 3))
FLOW = gf.GradientFlow(problem("whitened"))
ONES = np.ones((2, 2))


def simulate(t1=1.0, flow=FLOW, state=None, **options):
    return gf.simulate(flow, start() if state is None else state, t1, **options)


def descend(learning_rate=0.1, steps=2, flow=FLOW, state=None, **options):
    return gf.descend(flow, start() if state is None else state, learning_rate, steps, **options)


def off_pattern():
    A = np.array(start().adjacency())
    A[0, 3] = 0.25
    return A


# id: (call, argument that the message must start with, words on its value and the remedy)
NETWORK = {
    "no_layers": (lambda: gf.LinearNetwork([]), "weights", ["no layers", "at least one matrix"]),
    "one_array": (lambda: gf.LinearNetwork(np.ones((2, 2, 2))), "weights", ["[W_1, ..., W_h]"]),
    "vector_layer": (lambda: gf.LinearNetwork([np.ones(3)]), "weights[0] (W_1)", ["2 dimension"]),
    "mismatched_widths": (
        lambda: gf.LinearNetwork([np.ones((2, 3)), np.ones((2, 4))]),
        "weights[1] (W_2)",
        ["(2, 4)", "2 columns", "rows of W_1"],
    ),
    "nan_layer": (lambda: gf.LinearNetwork([NAN]), "weights[0] (W_1)", ["nan", "(0, 1)", "finite"]),
    "inf_layer": (lambda: gf.LinearNetwork([ONES, INF]), "weights[1] (W_2)", ["-inf", "finite"]),
    "complex_layer": (lambda: gf.LinearNetwork([1j * ONES]), "weights[0] (W_1)", ["real floats"]),
    "complex_list": (lambda: gf.LinearNetwork([[[1j]]]), "weights[0] (W_1)", ["real floats"]),
    "integer_layer": (
        lambda: gf.LinearNetwork([np.eye(2, dtype=int)]),
        "weights[0] (W_1)",
        ["int64", ".astype(float)"],
    ),
    "boolean_layer": (lambda: gf.LinearNetwork([ONES > 0]), "weights[0] (W_1)", ["bool", "astype"]),
    "text_layer": (lambda: gf.LinearNetwork([[["a"]]]), "weights[0] (W_1)", ["real numbers"]),
    "text_array": (
        lambda: gf.LinearNetwork([np.array([["a"]])]),
        "weights[0] (W_1)",
        ["real floats"],
    ),
    "object_array": (
        lambda: gf.LinearNetwork([np.array([[None]])]),
        "weights[0] (W_1)",
        ["object", "real floats"],
    ),
    "ragged_layer": (
        lambda: gf.LinearNetwork([[[1.0], [1.0, 2.0]]]),
        "weights[0] (W_1)",
        ["array"],
    ),
    "empty_layer": (lambda: gf.LinearNetwork([np.ones((0, 2))]), "weights[0] (W_1)", ["empty"]),
    "negative_power": (lambda: start().power(-1), "k", ["-1", "whole number >= 0"]),
    "fractional_power": (lambda: start().power(1.5), "k", ["1.5", "whole number"]),
    "adjacency_off_pattern": (
        lambda: gf.LinearNetwork.from_adjacency(off_pattern(), WIDTHS),
        "A",
        ["0.25", "(0, 3)", "exactly 0", "check the widths"],
    ),
    "adjacency_size": (
        lambda: gf.LinearNetwork.from_adjacency(np.zeros((3, 3)), WIDTHS),
        "A",
        ["(3, 3)", "(15, 15)"],
    ),
    "adjacency_nan": (lambda: gf.LinearNetwork.from_adjacency(NAN, (1, 1)), "A", ["nan", "finite"]),
    "dense_flow_size": (lambda: gf.adjacency_flow(ONES, ONES, WIDTHS), "A", ["(2, 2)", "(15, 15)"]),
    "dense_flow_target": (
        lambda: gf.adjacency_flow(start().adjacency(), ONES, WIDTHS),
        "target",
        ["(2, 2)", "(3, 4)"],
    ),
}
PROBLEM = {
    "target_vector": (lambda: gf.Problem(np.ones(3)), "target", ["(3,)", "2 dimension"]),
    "target_nan": (lambda: gf.Problem(NAN), "target", ["nan", "finite"]),
    "target_inf": (lambda: gf.Problem(INF), "target", ["inf", "finite"]),
    "target_complex": (lambda: gf.Problem(ONES * 1j), "target", ["complex", "real floats"]),
    "target_integer": (
        lambda: gf.Problem(np.eye(2, dtype=int)),
        "target",
        ["int", "astype(float)"],
    ),
    "target_none": (lambda: gf.Problem(None), "target", ["None"]),
    "covariance_shape": (
        lambda: gf.Problem(TARGET, np.eye(3)),
        "input_covariance",
        ["(3, 3)", "(4, 4)"],
    ),
    "covariance_asymmetric": (
        lambda: gf.Problem(TARGET, COVARIANCE + np.triu(np.ones((4, 4)), 1)),
        "input_covariance",
        ["asymmetry", "symmetric"],
    ),
    "covariance_indefinite": (
        lambda: gf.Problem(TARGET, np.diag([1.0, 1.0, 1.0, -0.5])),
        "input_covariance",
        ["-0.5", "positive semi-definite"],
    ),
    "covariance_zero": (lambda: gf.Problem(TARGET, np.zeros((4, 4))), "input_covariance", ["zero"]),
    "covariance_nan": (
        lambda: gf.Problem(TARGET, COVARIANCE * np.nan),
        "input_covariance",
        ["nan", "finite"],
    ),
    "target_outside_the_range_of_a_singular_covariance": (
        lambda: gf.Problem(TARGET, np.diag([1.0, 1.0, 1.0, 0.0])),
        "target",
        ["kernel of input_covariance", "no lower bound", "project"],
    ),
    "data_without_samples": (
        lambda: gf.Problem.from_data(np.ones((0, 3)), np.ones((0, 2))),
        "X",
        ["0 sample", "at least 2"],
    ),
    "data_with_one_sample": (
        lambda: gf.Problem.from_data(np.ones((1, 3)), np.ones((1, 2))),
        "X",
        ["1 sample", "at least 2"],
    ),
    "data_without_inputs": (
        lambda: gf.Problem.from_data(np.ones((5, 0)), np.ones((5, 2))),
        "X",
        ["(5, 0)", "column"],
    ),
    "data_of_unequal_length": (lambda: gf.Problem.from_data(X, Y[:7]), "Y", ["7", "10"]),
    "data_nan": (lambda: gf.Problem.from_data(X * np.nan, Y), "X", ["nan", "finite"]),
    "labels_inf": (lambda: gf.Problem.from_data(X, Y * np.inf), "Y", ["inf", "finite"]),
    "data_integer": (
        lambda: gf.Problem.from_data(np.ones((4, 2), dtype=int), Y[:4]),
        "X",
        ["int", "astype(float)"],
    ),
    "labels_vector": (lambda: gf.Problem.from_data(X, Y[:, 0]), "Y", ["(10,)", "2 dimension"]),
    "data_all_zero": (lambda: gf.Problem.from_data(0 * X, Y), "X", ["zero"]),
    "whiten_text": (lambda: gf.Problem.from_data(X, Y, whiten="no"), "whiten", ["True or False"]),
    "negative_singular_value": (
        lambda: gf.Problem.from_singular_values([1.0, -2.0]),
        "singular_values",
        ["-2", ">= 0"],
    ),
    "shape_too_small": (
        lambda: gf.Problem.from_singular_values([3.0, 2.0, 1.0], (3, 2)),
        "shape",
        ["(3, 2)", "3 singular values"],
    ),
    "shape_no_pair": (lambda: gf.Problem.from_loss(log_cosh, (3,)), "shape", ["pair (d_h, d_0)"]),
    "shape_zero": (lambda: gf.Problem.from_loss(log_cosh, (0, 4)), "shape[0]", ["0", ">= 1"]),
    "loss_no_function": (lambda: gf.Problem.from_loss(3.0, (2, 2)), "loss", ["3.0", "function"]),
    "loss_of_other_shape": (lambda: gf.Problem.from_loss(log_cosh, (2, 2)), "loss", ["(2, 2)"]),
    "loss_of_arrays": (lambda: gf.Problem.from_loss(jnp.tanh, (2, 2)), "loss", ["scalar"]),
    "map_of_other_shape": (
        lambda: problem("whitened").loss(jnp.ones((4, 3))),
        "W",
        ["(4, 3)", "(3, 4)"],
    ),
    "residual_of_other_shape": (
        lambda: problem("from_loss").residual(jnp.ones((4, 3))),
        "W",
        ["(4, 3)", "(3, 4)"],
    ),
    "no_target_to_diagonalise": (
        lambda: problem("from_loss").canonical(),
        "problem",
        ["given by a loss", "Problem(target)"],
    ),
    "no_target_singular_values": (
        lambda: problem("from_loss").singular_values,
        "problem",
        ["given by a loss", "from_data"],
    ),
    "assumptions_of_other_widths": (
        lambda: problem("whitened").assumptions((4, 3, 2)),
        "widths",
        ["(4, 3, 2)", "d_h = 3"],
    ),
}
INITIALIZE = {
    "one_width": (lambda: gf.initialize.gaussian(0, (3,), 1.0), "widths", ["at least two"]),
    "zero_width": (lambda: gf.initialize.gaussian(0, (3, 0, 2), 1.0), "widths[1]", ["0", ">= 1"]),
    "fractional_width": (lambda: gf.initialize.balanced(0, (3, 2.5), 1.0), "widths[1]", ["2.5"]),
    "widths_no_sequence": (lambda: gf.initialize.identity(3), "widths", ["3", "sequence"]),
    "negative_scale": (lambda: gf.initialize.gaussian(0, (3, 2), -1.0), "scale", ["-1", ">= 0"]),
    "nan_scale": (lambda: gf.initialize.orthogonal(0, (3, 2), np.nan), "scale", ["nan", "finite"]),
    "text_scale": (lambda: gf.initialize.balanced(0, (3, 2), "big"), "scale", ["'big'", "number"]),
    "text_key": (lambda: gf.initialize.gaussian("seed", (3, 2), 1.0), "key", ["jax.random.key"]),
    "negative_seed": (lambda: gf.initialize.gaussian(-1, (3, 2), 1.0), "key", ["-1", ">= 0"]),
    "many_keys": (
        lambda: gf.initialize.gaussian(jax.random.split(jax.random.key(0)), (3, 2), 1.0),
        "key",
        ["jax.vmap"],
    ),
    "product_of_other_shape": (
        lambda: gf.initialize.from_product(ONES, WIDTHS),
        "W",
        ["(2, 2)", "(3, 4)"],
    ),
    "product_of_too_high_rank": (
        lambda: gf.initialize.from_product(TARGET, (4, 2, 3)),
        "W",
        ["singular value number 3", "at most the narrowest width, 2"],
    ),
    "lambda_positive_needs_narrow_output_side": (
        lambda: gf.initialize.lambda_balanced(0, (3, 3, 2), 1.0, 0.5),
        "lam",
        ["0.5", "(3, 3, 2)", "d_1 <= d_2", "change the sign"],
    ),
    "lambda_negative_needs_narrow_input_side": (
        lambda: gf.initialize.lambda_balanced(0, (2, 3, 3), 1.0, -0.5),
        "lam",
        ["-0.5", "(2, 3, 3)", "d_1 <= d_0"],
    ),
    "lambda_impossible_for_a_hidden_bulge": (
        lambda: gf.initialize.lambda_balanced(0, (2, 3, 2), 1.0, 0.5),
        "lam",
        ["(2, 3, 2)", "layer"],
    ),
    "lambdas_of_other_number": (
        lambda: gf.initialize.lambda_balanced(0, (3, 3, 3), 1.0, [0.1, 0.2]),
        "lam",
        ["1 numbers"],
    ),
    "lambda_nan": (
        lambda: gf.initialize.lambda_balanced(0, (3, 3, 3), 1.0, np.nan),
        "lam",
        ["nan", "finite"],
    ),
    "negative_delta": (
        lambda: gf.initialize.delta_balanced(0, (3, 3, 3), 1.0, -0.1),
        "delta",
        ["-0.1", ">= 0"],
    ),
    "delta_of_one_layer": (
        lambda: gf.initialize.delta_balanced(0, (3, 3), 1.0, 0.1),
        "delta",
        ["0.1", "0 for depth 1"],
    ),
    "decoupled_modes": (
        lambda: gf.initialize.decoupled(problem("whitened"), (4, 2, 3), np.ones(3)),
        "scales",
        ["3 modes", "holds 2"],
    ),
    "decoupled_layers": (
        lambda: gf.initialize.decoupled(problem("whitened"), (4, 2, 3), np.ones((3, 2))),
        "scales",
        ["(3, 2)", "2 layers"],
    ),
    "decoupled_coupling": (
        lambda: gf.initialize.decoupled(problem("coloured"), (4, 3, 3), 1.0),
        "problem",
        ["couples modes by", "whiten=True"],
    ),
    "decoupled_loss": (
        lambda: gf.initialize.decoupled(problem("from_loss"), (4, 3, 3), 1.0),
        "problem",
        ["given by a loss"],
    ),
    "decoupled_no_problem": (
        lambda: gf.initialize.decoupled(TARGET, (4, 3, 3), 1.0),
        "problem",
        ["gradflow.Problem"],
    ),
    "decoupled_widths": (
        lambda: gf.initialize.decoupled(problem("whitened"), (3, 3, 3), 1.0),
        "widths",
        ["d_0 = 4"],
    ),
}
FLOWS = {
    "flow_of_an_array": (lambda: gf.GradientFlow(TARGET), "problem", ["gradflow.Problem"]),
    "negative_decay": (
        lambda: gf.GradientFlow(problem("whitened"), weight_decay=-0.1),
        "weight_decay",
        ["-0.1", ">= 0"],
    ),
}
KS = [np.ones(d) for d in WIDTHS[1:]]
BLOCK = gf.delta.DeltaBlock(np.ones(2), 0.5, 0.0)


def modulated(gates=0.5, directions=KS):
    return gf.DeltaModulatedFlow(problem("whitened"), gates, directions)


def residual(shortcuts):
    return gf.ResidualFlow(problem("whitened"), shortcuts)


def delta_network(directions=ONES, values=ONES, logits=(0.0, 0.0)):
    return gf.delta.DeltaNetwork(directions, values, logits)


DELTA = {
    "operator_without_direction": (
        lambda: gf.delta.operator(0.5, np.zeros(3)),
        "k",
        ["zero vector", "must not vanish"],
    ),
    "operator_gate": (lambda: gf.delta.operator(2.1, np.ones(3)), "beta", ["2.1", "<= 2"]),
    "operator_nan": (lambda: gf.delta.operator(0.5, [np.nan, 1.0]), "k", ["nan", "finite"]),
    "operator_argument": (
        lambda: gf.delta.operator(0.5, np.ones(3)) @ np.ones(2),
        "X",
        ["(2,)", "3 rows"],
    ),
    "spectrum_gate": (lambda: gf.delta.spectrum(-0.1, 3), "beta", ["-0.1", ">= 0"]),
    "spectrum_dimension": (lambda: gf.delta.spectrum(0.5, 0), "d", ["0", ">= 1"]),
    "determinant_columns": (lambda: gf.delta.determinant(0.5, 0), "columns", ["0", ">= 1"]),
    "regime_gate": (lambda: gf.delta.regime(3), "beta", ["3", "<= 2"]),
    "inverse_of_a_projection": (
        lambda: gf.delta.inverse(1.0, np.ones(3)),
        "beta",
        ["1", "projection", "no inverse"],
    ),
    "logit_gate": (lambda: gf.delta.gate_logit([0.5, 2.5]), "beta", ["2.5", "(1,)", "[0, 2]"]),
    "rewrite_gate": (lambda: gf.delta.rewrite(ONES, [1.0, 0.0], [1.0, 1.0], -1), "beta", ["-1"]),
    "rewrite_key": (
        lambda: gf.delta.rewrite(ONES, np.ones(3), np.ones(2), 1.0),
        "k",
        ["(3,)", "(2,)"],
    ),
    "rewrite_value": (lambda: gf.delta.rewrite(ONES, np.ones(2), 1.0, 1.0), "v", ["()", "(2,)"]),
    "rewrite_state": (
        lambda: gf.delta.rewrite(np.ones((2, 2, 2)), np.ones(2), 1.0, 1.0),
        "X",
        ["(2, 2, 2)", "(d, d_v)"],
    ),
    "block_direction": (
        lambda: gf.delta.DeltaBlock(np.zeros(2), 0.5, 0.0),
        "direction",
        ["zero vector"],
    ),
    "block_gate": (
        lambda: gf.delta.DeltaBlock(np.ones(2), 0.5, 2.5, squash=False),
        "gate",
        ["2.5", "[0, 2]"],
    ),
    "block_guard": (
        lambda: gf.delta.DeltaBlock(np.ones(2), 0.5, 0.0, guard=0.0),
        "guard",
        ["0.0", "> 0"],
    ),
    "block_state": (lambda: BLOCK(np.ones(3)), "direction", ["(2,)", "(3,)"]),
    "block_matrix_state": (lambda: BLOCK(ONES), "value", ["()", "(2,)"]),
    "branch_shape": (
        lambda: gf.delta.ResidualBlock(lambda X: X[:1])(np.ones(2)),
        "branch",
        ["(1,)", "(2,)"],
    ),
    "highway_gate": (
        lambda: gf.delta.HighwayBlock(lambda X: X, [0.0])(np.ones(2)),
        "gate",
        ["(1,)", "(2,)"],
    ),
    "invertible_bound": (
        lambda: gf.delta.InvertibleBlock(lambda X: 0.5 * X, 1.0),
        "lipschitz",
        ["1.0", "< 1"],
    ),
    "invertible_no_contraction": (
        lambda: gf.delta.InvertibleBlock(lambda X: 3 * X, 0.5).inverse(jnp.ones(2)),
        "branch",
        ["does not converge", "contraction"],
    ),
    "contraction_weight": (lambda: gf.delta.Contraction(np.ones((2, 3))), "weight", ["(2, 3)"]),
    "orthogonal_generator": (
        lambda: gf.delta.OrthogonalBlock(np.ones((2, 3))),
        "generator",
        ["square"],
    ),
    "stack_of_nothing": (lambda: gf.delta.stack([]), "blocks", ["no blocks", "at least one"]),
    "stack_of_a_number": (lambda: gf.delta.stack([1.0]), "blocks[0]", ["1.0", "a block"]),
    "stack_of_two_kinds": (
        lambda: gf.delta.stack([BLOCK, gf.delta.DeltaBlock(np.ones(3), 0.5, 0.0)]),
        "blocks[1]",
        ["another structure", "one kind"],
    ),
    "stack_of_one_block": (lambda: gf.delta.Stack(BLOCK), "blocks", ["sequence of blocks"]),
    "unroll_steps": (lambda: gf.delta.unroll(BLOCK, np.ones(2), -1), "steps", ["-1", ">= 0"]),
    "unroll_no_block": (lambda: gf.delta.unroll(ONES, np.ones(2), 1), "block", ["a block"]),
    "memory_values": (
        lambda: gf.delta.memory(ONES, np.ones((3, 2)), np.ones(2)),
        "values",
        ["3 steps", "2 keys"],
    ),
    "memory_gates": (
        lambda: gf.delta.hebbian_memory(ONES, ONES, [0.5, 2.5]),
        "gates",
        ["2.5", "(1,)", "[0, 2]"],
    ),
    "memory_initial": (
        lambda: gf.delta.memory(ONES, ONES, np.ones(2), np.ones((3, 2))),
        "initial",
        ["(3, 2)", "(2, 2)"],
    ),
    "depth_flow_block": (
        lambda: gf.delta.rewrite_flow(gf.delta.ResidualBlock(lambda X: X), np.ones(2), 1.0),
        "block",
        ["DeltaBlock"],
    ),
    "depth_flow_state": (
        lambda: gf.delta.rewrite_flow(BLOCK, np.ones(3), 1.0),
        "direction",
        ["(2,)", "(3,)"],
    ),
    "depth_flow_nan": (
        lambda: gf.delta.rewrite_flow(BLOCK, [1.0, np.nan], 1.0),
        "state",
        ["nan", "finite"],
    ),
    "network_direction": (
        lambda: delta_network([[1.0, 0.0], [0.0, 0.0]]),
        "directions[1]",
        ["zero vector"],
    ),
    "network_values": (lambda: delta_network(values=np.ones((2, 3))), "values", ["(2, 3)"]),
    "network_logits": (lambda: delta_network(logits=[0.0]), "gate_logits", ["(1,)", "(2,)"]),
    "network_gate": (
        lambda: gf.delta.DeltaNetwork.random(0, 2, 2, beta=2.0),
        "beta",
        ["2.0", "< 2"],
    ),
    "delta_flow_of_a_rectangular_target": (
        lambda: gf.DeltaNetworkFlow(problem("whitened")),
        "problem",
        ["(3, 4)", "square"],
    ),
    "delta_flow_state": (
        lambda: simulate(flow=gf.DeltaNetworkFlow(gf.Problem(ONES))),
        "state",
        ["DeltaNetwork"],
    ),
    "delta_flow_width": (
        lambda: simulate(flow=gf.DeltaNetworkFlow(gf.Problem(np.eye(3))), state=delta_network()),
        "state",
        ["(2, 2)", "(3, 3)"],
    ),
    "parameter_flow_state": (
        lambda: simulate(flow=gf.ParameterFlow(problem("whitened")), state=ONES),
        "state",
        ["end_to_end"],
    ),
    "residual_one_matrix": (lambda: residual(0.5), "shortcuts", ["0.5", "sequence"]),
    "residual_number": (
        lambda: residual([0.5, 1.0, 1.0]),
        "shortcuts[0] (D_1)",
        ["0.5", "matrix"],
    ),
    "residual_count": (
        lambda: simulate(flow=residual([None, None])),
        "state",
        ["3 branches", "2 shortcuts"],
    ),
    "residual_shape": (
        lambda: simulate(flow=residual([None, ONES, None])),
        "state.weights[1] (W_2)",
        ["(5, 3)", "(2, 2)"],
    ),
    "modulated_gate": (
        lambda: modulated([0.5, 2.5, 1.0]),
        "gates",
        ["2.5", "(1,)", "[0, 2]"],
    ),
    "modulated_negative_gate": (lambda: modulated(-0.5), "gates", ["-0.5", "[0, 2]"]),
    "modulated_count": (lambda: modulated([0.5, 0.5]), "gates", ["(2,)", "3 directions"]),
    "modulated_direction": (
        lambda: modulated(directions=[KS[0], np.zeros(5), KS[2]]),
        "directions[1] (k_2)",
        ["zero vector"],
    ),
    "modulated_no_directions": (lambda: modulated(directions=[]), "directions", ["no directions"]),
    "modulated_one_direction": (lambda: modulated(directions=1.0), "directions", ["1.0"]),
    "modulated_width": (
        lambda: simulate(flow=modulated(directions=[np.ones(2), *KS[1:]])),
        "directions[0] (k_1)",
        ["(2,)", "(3,)"],
    ),
    "modulated_depth": (
        lambda: simulate(flow=modulated(directions=KS[:2])),
        "state",
        ["3 layers", "2 gates"],
    ),
    "modulated_function_out_of_range": (
        lambda: simulate(flow=modulated(lambda t, state: jnp.full(3, 2.5))),
        "gates",
        ["2.5", "[0, 2]"],
    ),
    "modulated_function_shape": (
        lambda: simulate(flow=modulated(lambda t, state: jnp.ones(2))),
        "gates",
        ["(2,)", "(3,)"],
    ),
    "modulated_mixed_shape": (
        lambda: simulate(flow=modulated([lambda t, state: jnp.ones(2), 0.5, 0.5])),
        "gates[0]",
        ["(2,)", "scalars"],
    ),
    "modulated_conserving": (
        lambda: simulate(flow=modulated(), method=gf.Method(solver="conserving")),
        "solver",
        ["DeltaModulatedFlow", "'implicit'"],
    ),
    "laws_of_no_flow": (
        lambda: gf.observables.independent_laws(start(), problem("whitened")),
        "flow",
        ["a flow"],
    ),
}
SIMULATE = {
    "negative_end": (lambda: simulate(-1.0), "t1", ["-1", ">= t0 = 0"]),
    "end_before_start": (lambda: simulate(1.0, t0=2.0), "t1", ["1", ">= t0 = 2"]),
    "end_nan": (lambda: simulate(np.nan), "t1", ["nan", "finite"]),
    "end_inf": (lambda: simulate(np.inf), "t1", ["inf", "finite"]),
    "end_text": (lambda: simulate("long"), "t1", ["'long'", "number"]),
    "start_time_nan": (lambda: simulate(t0=np.nan), "t0", ["nan", "finite"]),
    "no_flow": (lambda: simulate(flow=problem("whitened")), "flow", ["GradientFlow"]),
    "flow_class": (lambda: simulate(flow=gf.GradientFlow), "flow", ["GradientFlow"]),
    "state_of_weights": (
        lambda: simulate(state=list(start().weights)),
        "state",
        ["gradflow.LinearNetwork"],
    ),
    "state_of_other_widths": (
        lambda: simulate(state=start((3, 3))),
        "widths",
        ["(3, 3)", "d_0 = 4", "d_h = 3"],
    ),
    "state_batch": (
        lambda: simulate(state=jax.tree.map(lambda w: jnp.stack([w, w]), start())),
        "state",
        ["batch", "jax.vmap"],
    ),
    "unsorted_saves": (lambda: simulate(save=[0.5, 0.2]), "save", ["strictly increasing", "sort"]),
    "repeated_saves": (lambda: simulate(save=[0.5, 0.5]), "save", ["strictly increasing"]),
    "late_saves": (lambda: simulate(save=[0.5, 1.5]), "save", ["1.5", "[t0, t1] = [0, 1]"]),
    "early_saves": (lambda: simulate(save=[-0.5, 0.5]), "save", ["-0.5", "[t0, t1]"]),
    "nan_saves": (lambda: simulate(save=[0.1, np.nan]), "save", ["nan", "finite"]),
    "no_saves": (lambda: simulate(save=[]), "save", ["empty"]),
    "matrix_of_saves": (lambda: simulate(save=[[0.1, 0.2]]), "save", ["1 dimension"]),
    "one_save": (lambda: simulate(save=1), "save", ["1", ">= 2"]),
    "fractional_saves": (lambda: simulate(save=2.5), "save", ["2.5", "whole number"]),
    "unknown_save": (
        lambda: simulate(save="lag"),
        "save",
        ["'lag'", "did you mean 'log'?", "array"],
    ),
    "save_none": (lambda: simulate(save=None), "save", ["None", "number of points"]),
    "save_true": (lambda: simulate(save=True), "save", ["True", "number of points"]),
    "method_text": (
        lambda: simulate(method="explicit"),
        "method",
        ["'explicit'", "gradflow.Method"],
    ),
    "negative_stop": (
        lambda: simulate(stop_gradient_norm=-1.0),
        "stop_gradient_norm",
        ["-1", ">= 0"],
    ),
    "observe_function": (lambda: simulate(observe=jnp.sum), "observe", ["dict"]),
    "observe_number": (lambda: simulate(observe={"x": 3}), "observe['x']", ["3", "function"]),
    "observe_reserved": (
        lambda: simulate(observe={"loss": jnp.sum}),
        "observe",
        ["'loss'", "another"],
    ),
    "observe_default": (
        lambda: simulate(observe={"singular_values": jnp.sum}),
        "observe",
        ["'singular_values'", "another name"],
    ),
    "observe_odd_name": (
        lambda: simulate(observe={"a b": jnp.sum}),
        "observe",
        ["'a b'", "identif"],
    ),
    "observe_number_name": (lambda: simulate(observe={3: jnp.sum}), "observe", ["3", "identif"]),
    "tolerance_beyond_float64": (
        lambda: simulate(method=gf.Method(rtol=1e-16)),
        "rtol",
        ["1e-16", "float64", "loosen"],
    ),
}
METHOD = {
    "unknown_solver": (
        lambda: gf.Method(solver="explict"),
        "solver",
        ["'explict'", "did you mean 'explicit'?", "diffrax solver"],
    ),
    "solver_of_no_kind": (lambda: gf.Method(solver="rk4"), "solver", ["'rk4'", "'implicit'"]),
    "solver_class": (lambda: gf.Method(solver=diffrax.Tsit5), "solver", ["diffrax solver"]),
    "rtol_zero": (lambda: gf.Method(rtol=0.0), "rtol", ["0", "> 0"]),
    "rtol_large": (lambda: gf.Method(rtol=2.0), "rtol", ["2", "<= 1"]),
    "rtol_nan": (lambda: gf.Method(rtol=np.nan), "rtol", ["nan", "finite"]),
    "atol_negative": (lambda: gf.Method(atol=-1e-3), "atol", ["-0.001", "> 0"]),
    "max_steps_zero": (lambda: gf.Method(max_steps=0), "max_steps", ["0", ">= 1"]),
    "max_steps_float": (lambda: gf.Method(max_steps=1e6), "max_steps", ["whole number"]),
    "step_size_zero": (
        lambda: gf.Method(solver=diffrax.Euler(), step_size=0.0),
        "step_size",
        ["0", "> 0"],
    ),
    "euler_without_step": (
        lambda: gf.Method(solver=diffrax.Euler()),
        "solver",
        ["Euler", "no error estimate", "step_size="],
    ),
}
DESCEND = {
    "rate_zero": (lambda: descend(0.0), "learning_rate", ["0", "> 0"]),
    "rate_negative": (lambda: descend(-0.1), "learning_rate", ["-0.1", "> 0"]),
    "rate_nan": (lambda: descend(np.nan), "learning_rate", ["nan", "finite"]),
    "steps_negative": (lambda: descend(steps=-1), "steps", ["-1", ">= 0"]),
    "steps_float": (lambda: descend(steps=10.0), "steps", ["10.0", "whole number"]),
    "momentum_one": (lambda: descend(momentum=1.0), "momentum", ["1", "< 1"]),
    "momentum_negative": (lambda: descend(momentum=-0.5), "momentum", ["-0.5", ">= 0"]),
    "save_every_zero": (lambda: descend(save_every=0), "save_every", ["0", ">= 1"]),
    "descend_reserved": (lambda: descend(observe={"drift": jnp.sum}), "observe", ["'drift'"]),
    "descend_no_flow": (lambda: descend(flow=TARGET), "flow", ["GradientFlow"]),
    "descend_state": (lambda: descend(state=TARGET), "state", ["LinearNetwork"]),
}
RESULTS = {
    "network_of_batch": (
        lambda: jax.tree.map(lambda x: jnp.stack([x, x]), run("whitened")).network(0),
        "traj",
        ["batch", "lane(i)"],
    ),
    "lane_of_single_run": (lambda: run("whitened").lane(0), "traj", ["batch axis"]),
    "fraction_one": (
        lambda: gf.observables.learning_times(run("whitened"), 1.0),
        "fraction",
        ["1", "< 1"],
    ),
    "learning_times_without_target": (
        lambda: gf.observables.learning_times(run("from_loss")),
        "traj",
        ["without a target", "quadratic"],
    ),
    "kernel_inputs": (
        lambda: gf.observables.tangent_kernel(start(), X),
        "X",
        ["(10, 3)", "4 columns"],
    ),
    "kernel_shapes": (
        lambda: gf.observables.kernel_distance(np.eye(2), np.eye(3)),
        "k2",
        ["(3, 3)", "(2, 2)"],
    ),
    "kernel_zero": (
        lambda: gf.observables.kernel_distance(np.eye(2), np.zeros((2, 2))),
        "k2",
        ["zeros", "not vanish"],
    ),
    "alignment_shape": (
        lambda: gf.observables.alignment(start((3, 3)), problem("whitened")),
        "widths",
        ["d_0 = 4"],
    ),
    "assertion_on_a_network": (
        lambda: gf.testing.assert_conserved(start(), 1e-6),
        "traj",
        ["gradflow.Trajectory"],
    ),
    "assertion_tolerance": (
        lambda: gf.testing.assert_conserved(run("whitened"), -1.0),
        "atol",
        ["-1", ">= 0"],
    ),
}
ALL = NETWORK | PROBLEM | INITIALIZE | FLOWS | DELTA | SIMULATE | METHOD | DESCEND | RESULTS


def test_no_case_is_shadowed_by_another_of_its_name():
    groups = (NETWORK, PROBLEM, INITIALIZE, FLOWS, DELTA, SIMULATE, METHOD, DESCEND, RESULTS)
    assert len(ALL) == sum(map(len, groups))


@pytest.mark.parametrize("name", ALL)
def test_bad_argument_is_refused_by_name_value_and_remedy(name):
    call, argument, words = ALL[name]
    with pytest.raises(ValueError, match=r": got .*; ") as caught:
        call()
    error = caught.value
    assert isinstance(error, gf.errors.GradflowError)
    assert error.argument == argument
    assert str(error).startswith(f"{argument}: got ")
    for word in words:
        assert word in str(error)


@pytest.mark.parametrize("index", [41, -42])
def test_network_index_out_of_range_is_an_index_error(index):
    with pytest.raises(IndexError, match=f"{index}.*41 saved times"):
        run("whitened").network(index)


def test_unknown_observable_is_a_key_error_that_lists_the_known_ones():
    with pytest.raises(KeyError, match=r"no observable 'losses'.*loss.*nonnormality"):
        run("whitened")["losses"]


def test_errors_survive_a_trip_between_processes():
    import pickle

    error = gf.errors.ShapeError("A", "shape (2,)", "it must have 2 dimensions")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is gf.errors.ShapeError
    assert (str(again), again.argument) == (str(error), "A")
