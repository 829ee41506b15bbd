"""What is measured on a network or along a trajectory."""

from gradflow.observables.balance import balancedness as balancedness
from gradflow.observables.balance import conservation_drift as conservation_drift
from gradflow.observables.balance import imbalance as imbalance
from gradflow.observables.balance import independent_laws as independent_laws
from gradflow.observables.kernel import kernel_distance as kernel_distance
from gradflow.observables.kernel import tangent_kernel as tangent_kernel
from gradflow.observables.learning import LearningTimes as LearningTimes
from gradflow.observables.learning import learning_times as learning_times
from gradflow.observables.spectra import Alignment as Alignment
from gradflow.observables.spectra import alignment as alignment
from gradflow.observables.spectra import effective_rank as effective_rank
from gradflow.observables.spectra import layer_singular_values as layer_singular_values
from gradflow.observables.spectra import nonnormality as nonnormality
from gradflow.observables.spectra import singular_values as singular_values
