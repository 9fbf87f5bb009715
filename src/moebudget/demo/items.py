"""Task items of the demo, and the words that they use."""

from __future__ import annotations

import random
from dataclasses import dataclass

Rng = random.Random

NAMES = (
    "Anna Ben Carla David Emma Frank Grace Henry Ivy Jack Kate Leo Mia Noah Olivia Paul Quinn Rosa Sam Tara Uma "
    "Victor Wendy Xander Yara Zoe Alice Bob Clara Daniel Ella Finn Gina Hugo Irene James"
).split()
ITEMS = (
    "apples oranges pencils books marbles stickers cookies coins stamps shells cards balloons buttons candles "
    "flowers eggs stones toys cups hats"
).split()
COLORS = "red blue green yellow black white brown pink gray orange".split()
PLACES = "garden kitchen park school library market station museum office beach".split()
ANIMALS = "cat dog bird horse rabbit fox bear duck goat mouse".split()


@dataclass(frozen=True, slots=True)
class TaskItem:
    """One question: `target` is the exact continuation of `prompt`; `choices` is set if guessing is often right."""

    task: str
    prompt: str
    target: str
    choices: tuple[str, ...] | None = None
    key: str = ""
