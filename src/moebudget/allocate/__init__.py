"""How an average number of experts is spread over the layers: measured, solved, stored in the statistics."""

from moebudget.allocate.run import allocate as allocate
from moebudget.allocate.sketch import sketch as sketch

__all__ = ["allocate", "sketch"]
