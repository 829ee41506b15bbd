"""One module per figure, run by ``python -m experiments``.

A new experiment is one new file here: a docstring whose first line says what the figure shows, a
frozen dataclass ``Config`` with a classmethod ``full``, and three functions: ``compute(config)``
returns an ``xarray.Dataset``, ``summary(data)`` the key numbers as text, and ``figure(data)`` a
matplotlib figure, or several by name. Names that start with an underscore are not experiments.
"""
