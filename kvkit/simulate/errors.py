"""What is wrong with a simulation."""

from __future__ import annotations


class SimulationError(ValueError):
    """A trace or a setting is not what it must be. The message says where, what and which are the choices."""
