"""The right-hand sides, one file each."""

from gradflow.flows.base import AbstractFlow as AbstractFlow
from gradflow.flows.end_to_end import EndToEndFlow as EndToEndFlow
from gradflow.flows.gradient import GradientFlow as GradientFlow
from gradflow.flows.modes import ModeFlow as ModeFlow
