from typing import NamedTuple
class Expected(NamedTuple):
    value: float
    source: str
EXPECTED = {}
