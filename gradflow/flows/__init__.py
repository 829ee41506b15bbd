"""The right-hand sides, one file each."""

from gradflow.flows.base import AbstractFlow as AbstractFlow
from gradflow.flows.delta_network import DeltaNetworkFlow as DeltaNetworkFlow
from gradflow.flows.end_to_end import EndToEndFlow as EndToEndFlow
from gradflow.flows.gradient import GradientFlow as GradientFlow
from gradflow.flows.modes import ModeFlow as ModeFlow
from gradflow.flows.modulated import DeltaModulatedFlow as DeltaModulatedFlow
from gradflow.flows.parameters import ParameterFlow as ParameterFlow
from gradflow.flows.residual import ResidualFlow as ResidualFlow
from gradflow.flows.rewrite import RewriteFlow as RewriteFlow
