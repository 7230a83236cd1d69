"""Weakens every synchronising instruction of a kernel, one at a time; reports which losses the simulator notices."""

from .rules import RULES, Rule
from .running import SCHEDULES, MutantsError, mutants
from .sites import Mutant, mutants_of
from .table import WAYS, Mutants, Outcome, Row

__all__ = [
    "RULES",
    "SCHEDULES",
    "WAYS",
    "Mutant",
    "Mutants",
    "MutantsError",
    "Outcome",
    "Row",
    "Rule",
    "mutants",
    "mutants_of",
]
