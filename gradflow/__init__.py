"""Gradient flows of deep linear networks: simulate them, and see what they learn."""

from typing import Any

from gradflow import datasets as datasets
from gradflow import delta as delta
from gradflow import errors as errors
from gradflow import exact as exact
from gradflow import initialize as initialize
from gradflow import landscape as landscape
from gradflow import losses as losses
from gradflow import lyapunov as lyapunov
from gradflow import observables as observables
from gradflow import provenance as provenance
from gradflow import testing as testing
from gradflow.connections import Connection as Connection
from gradflow.connections import heteroclinic as heteroclinic
from gradflow.depth import rewrite_flow as _rewrite_flow
from gradflow.descend import descend as descend
from gradflow.ensemble import ensemble as ensemble
from gradflow.flows import AbstractFlow as AbstractFlow
from gradflow.flows import DeltaModulatedFlow as DeltaModulatedFlow
from gradflow.flows import DeltaNetworkFlow as DeltaNetworkFlow
from gradflow.flows import EndToEndFlow as EndToEndFlow
from gradflow.flows import GradientFlow as GradientFlow
from gradflow.flows import ModeFlow as ModeFlow
from gradflow.flows import ParameterFlow as ParameterFlow
from gradflow.flows import ResidualFlow as ResidualFlow
from gradflow.flows import RewriteFlow as RewriteFlow
from gradflow.method import Method as Method
from gradflow.network import LinearNetwork as LinearNetwork
from gradflow.network import adjacency_flow as adjacency_flow
from gradflow.problem import Problem as Problem
from gradflow.reduction import Lift as Lift
from gradflow.reduction import compress as compress
from gradflow.simulate import simulate as simulate
from gradflow.storage import load as load
from gradflow.sweep import sweep as sweep
from gradflow.trajectory import Stats as Stats
from gradflow.trajectory import Status as Status
from gradflow.trajectory import Trajectory as Trajectory

# Its floor is above that of the package in which users look for it.
delta.rewrite_flow = _rewrite_flow

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # matplotlib takes long to import and is not needed to integrate.
    if name == "plot":
        from gradflow import plotting

        return plotting
    raise AttributeError(f"module 'gradflow' has no attribute {name!r}")
