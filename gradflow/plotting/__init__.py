"""Pictures of runs and networks: each takes ``ax=`` and returns the axes it drew on."""

from gradflow.plotting.conservation import drift as drift
from gradflow.plotting.learning import modes as modes
from gradflow.plotting.losses import loss as loss
from gradflow.plotting.matrices import adjacency as adjacency
from gradflow.plotting.rank import effective_rank as effective_rank
from gradflow.plotting.style import TIME_LABEL as TIME_LABEL
from gradflow.plotting.style import palette as palette
from gradflow.plotting.style import style as style
