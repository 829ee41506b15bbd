"""Parts of diffrax made for, or tuned to, gradient flows."""

from gradflow.solvers.collocation import GaussLegendre as GaussLegendre
from gradflow.solvers.controllers import GuardedSteps as GuardedSteps
from gradflow.solvers.implicit import kvaerno5 as kvaerno5
