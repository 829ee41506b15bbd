"""Lyapunov exponents of products of random Jacobians: depth as time."""

from gradflow.lyapunov.closed_forms import closed_form as closed_form
from gradflow.lyapunov.closed_forms import threshold as threshold
from gradflow.lyapunov.closed_forms import threshold_limit as threshold_limit
from gradflow.lyapunov.determinant import Determinant as Determinant
from gradflow.lyapunov.determinant import determinant as determinant
from gradflow.lyapunov.ensembles import AbstractEnsemble as AbstractEnsemble
from gradflow.lyapunov.ensembles import BlockTriangular as BlockTriangular
from gradflow.lyapunov.ensembles import Cyclic as Cyclic
from gradflow.lyapunov.ensembles import DeltaProduct as DeltaProduct
from gradflow.lyapunov.ensembles import Finite as Finite
from gradflow.lyapunov.ensembles import Gaussian as Gaussian
from gradflow.lyapunov.ensembles import Haar as Haar
from gradflow.lyapunov.ensembles import Layers as Layers
from gradflow.lyapunov.ensembles import RankOneMixture as RankOneMixture
from gradflow.lyapunov.ensembles import Sampled as Sampled
from gradflow.lyapunov.ensembles import delta as delta
from gradflow.lyapunov.ensembles import delta_operator as delta_operator
from gradflow.lyapunov.ensembles import network_layers as network_layers
from gradflow.lyapunov.ensembles import residual as residual
from gradflow.lyapunov.projective import StationaryMeasure as StationaryMeasure
from gradflow.lyapunov.projective import sample_stationary as sample_stationary
from gradflow.lyapunov.projective import stationary_measure as stationary_measure
from gradflow.lyapunov.spectrum import Spectrum as Spectrum
from gradflow.lyapunov.spectrum import exponents as exponents
