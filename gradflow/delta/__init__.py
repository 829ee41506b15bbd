"""Deep delta learning: the operator, the rewrite block, its neighbours, linear networks."""

from collections.abc import Callable
from typing import Any

from gradflow.delta.blocks import AbstractBlock as AbstractBlock
from gradflow.delta.blocks import Affine as Affine
from gradflow.delta.blocks import Contraction as Contraction
from gradflow.delta.blocks import DeltaBlock as DeltaBlock
from gradflow.delta.blocks import HighwayBlock as HighwayBlock
from gradflow.delta.blocks import InvertibleBlock as InvertibleBlock
from gradflow.delta.blocks import OrthogonalBlock as OrthogonalBlock
from gradflow.delta.blocks import ResidualBlock as ResidualBlock
from gradflow.delta.blocks import Stack as Stack
from gradflow.delta.blocks import rewrite as rewrite
from gradflow.delta.blocks import stack as stack
from gradflow.delta.blocks import unroll as unroll
from gradflow.delta.memories import crosstalk as crosstalk
from gradflow.delta.memories import depth_stack as depth_stack
from gradflow.delta.memories import hebbian_memory as hebbian_memory
from gradflow.delta.memories import memory as memory
from gradflow.delta.networks import AbstractLayers as AbstractLayers
from gradflow.delta.networks import DeltaNetwork as DeltaNetwork
from gradflow.delta.networks import DeltaShortcutNetwork as DeltaShortcutNetwork
from gradflow.delta.networks import HighwayNetwork as HighwayNetwork
from gradflow.delta.networks import OrthogonalNetwork as OrthogonalNetwork
from gradflow.delta.operators import GUARD as GUARD
from gradflow.delta.operators import DeltaOperator as DeltaOperator
from gradflow.delta.operators import determinant as determinant
from gradflow.delta.operators import gate as gate
from gradflow.delta.operators import gate_logit as gate_logit
from gradflow.delta.operators import guarded as guarded
from gradflow.delta.operators import inverse as inverse
from gradflow.delta.operators import operator as operator
from gradflow.delta.operators import regime as regime
from gradflow.delta.operators import spectrum as spectrum

# It integrates, so it lives above this floor, in gradflow.depth; gradflow puts it here.
rewrite_flow: Callable[..., Any]
