"""All defects that are planted."""

from __future__ import annotations

from simulation.cache_mutants import CACHE_MUTANTS
from simulation.folder_mutants import FOLDER_MUTANTS
from simulation.handoff_mutants import HANDOFF_MUTANTS
from simulation.router_mutants import ROUTER_MUTANTS

MUTANTS = CACHE_MUTANTS + FOLDER_MUTANTS + HANDOFF_MUTANTS + ROUTER_MUTANTS
