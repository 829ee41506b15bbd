"""Parts of diffrax made for, or tuned to, gradient flows."""

from gradflow.solvers.collocation import GaussLegendre as GaussLegendre
from gradflow.solvers.controllers import GuardedSteps as GuardedSteps
from gradflow.solvers.controllers import PredictiveSteps as PredictiveSteps
from gradflow.solvers.explicit import DormandPrince8 as DormandPrince8
from gradflow.solvers.implicit import kvaerno5 as kvaerno5
from gradflow.solvers.linearisation import Eigenbasis as Eigenbasis
from gradflow.solvers.linearisation import Krylov as Krylov
from gradflow.solvers.linearisation import StiffSubspace as StiffSubspace
from gradflow.solvers.stabilised import OrthogonalChebyshev as OrthogonalChebyshev
from gradflow.solvers.switching import Switching as Switching
