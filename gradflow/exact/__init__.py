"""Closed forms: oracles that owe nothing to the flows or the integrator."""

from gradflow.exact.landmarks import max_learning_rate as max_learning_rate
from gradflow.exact.landmarks import sharpness as sharpness
from gradflow.exact.modes import escape_time as escape_time
from gradflow.exact.modes import infinite_depth_mode as infinite_depth_mode
from gradflow.exact.modes import mode as mode
from gradflow.exact.modes import mode_time as mode_time
from gradflow.exact.modes import unbalanced_mode as unbalanced_mode
from gradflow.exact.modes import unbalanced_mode_time as unbalanced_mode_time
from gradflow.exact.two_layer import TwoLayer as TwoLayer
from gradflow.exact.two_layer import two_layer as two_layer
