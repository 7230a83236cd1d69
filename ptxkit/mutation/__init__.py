"""Weakens every synchronising instruction of a kernel, one at a time; reports which losses the simulator notices."""

from .rules import RULES, Weakening
from .running import SCHEDULES, MutantsError, mutants
from .sites import Mutant, mutants_of
from .table import WAYS, Mutants, Outcome, OutcomeRow

__all__ = [
    "RULES", "SCHEDULES", "WAYS", "Mutant", "Mutants", "MutantsError", "Outcome", "OutcomeRow", "Weakening", "mutants",
    "mutants_of",
]
