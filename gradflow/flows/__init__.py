"""The right-hand sides, one file each."""

from gradflow.flows.base import AbstractFlow as AbstractFlow
from gradflow.flows.gradient import GradientFlow as GradientFlow
