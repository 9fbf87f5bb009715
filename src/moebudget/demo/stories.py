"""The demo's tasks in sentences: word problems with a worked solution, and yes/no questions on a passage."""

from __future__ import annotations

from moebudget.demo.items import ANIMALS, COLORS, ITEMS, NAMES, PLACES, Rng, TaskItem


def make_word(rng: Rng) -> TaskItem:
    n, m = rng.sample(NAMES, 2)
    it, form = rng.choice(ITEMS), rng.randrange(10)
    a, b, c = rng.randint(2, 60), rng.randint(2, 60), rng.randint(2, 12)
    key: tuple[int, ...] = (a, b, c)
    if form == 0:
        q = f"{n} has {a} {it}. {m} gives {n} {b} more {it}. How many {it} does {n} have now?"
        s, v, key = f"{n} starts with {a} {it} and gets {b} more, so {a} + {b} = {a + b}.", a + b, (a, b)
    elif form == 1:
        a, b = max(a, b) + 1, min(a, b)
        q = f"{n} had {a} {it} and gave {b} of them to {m}. How many {it} does {n} have left?"
        s, v, key = f"{n} gave away {b} {it}, so {a} - {b} = {a - b}.", a - b, (a, b)
    elif form == 2:
        q = f"{n} buys {c} bags of {it}. Each bag has {a} {it}. How many {it} does {n} have in total?"
        s, v, key = f"There are {c} bags with {a} {it} each, so {c} * {a} = {a * c}.", a * c, (a, c)
    elif form == 3:
        q = f"{n} has {a} {it} and buys {c} boxes with {b} {it} in each box. How many {it} does {n} have now?"
        s = f"The boxes hold {c} * {b} = {b * c} {it}. Together that is {a} + {b * c} = {a + b * c}."
        v = a + b * c
    elif form == 4:
        q = f"{n} has {a * c} {it} and shares them equally among {c} friends. How many {it} does each friend get?"
        s, v, key = f"Each friend gets {a * c} / {c} = {a} {it}.", a, (a, c)
    elif form == 5:
        q = f"A ticket costs {a} dollars. {n} buys {c} tickets and pays with {a * c + b} dollars. "
        q += f"How much change does {n} get?"
        s = f"The tickets cost {c} * {a} = {a * c} dollars. The change is {a * c + b} - {a * c} = {b}."
        v = b
    elif form == 6:
        q = f"{n} reads {a} pages on Monday and {b} pages on Tuesday. On Wednesday {n} reads {c} pages more than on "
        q += f"Tuesday. How many pages does {n} read on all three days?"
        s = f"On Wednesday {n} reads {b} + {c} = {b + c} pages. "
        s += f"In total that is {a} + {b} + {b + c} = {a + b + b + c}."
        v = a + 2 * b + c
    elif form == 7:
        q = f"{n} has {a} {it}. {m} has {c} times as many {it} as {n}. How many {it} do they have together?"
        s = f"{m} has {c} * {a} = {a * c} {it}. Together they have {a} + {a * c} = {a + a * c}."
        v, key = a + a * c, (a, c)
    elif form == 8:
        a = a + b + c
        q = f"{n} picked {a} {it}. {b} of them were lost and {c} were given to {m}. How many {it} are left?"
        s = f"{n} no longer has {b} + {c} = {b + c} {it}. So {a} - {b + c} = {a - b - c} are left."
        v, key = a - b - c, (a, b, c)
    else:
        q = f"{n} earns {a} dollars each day and works {c} days. Then {n} spends {b} dollars. "
        q += f"How many dollars does {n} have left?"
        v = a * c - b
        s = f"{n} earns {c} * {a} = {a * c} dollars. After spending, {a * c} - {b} = {v} dollars are left."
    return TaskItem("word", f"Question: {q}\nAnswer:", f" {s} #### {v}", None, f"word:{form}:{key}")


def make_boolq(rng: Rng) -> TaskItem:
    people = rng.sample(NAMES, rng.randint(3, 4))
    facts: list[str] = []
    place, color, animal, age = dict[str, str](), dict[str, str](), dict[str, str](), dict[str, int]()
    for p in people:
        place[p], color[p], animal[p] = rng.choice(PLACES), rng.choice(COLORS), rng.choice(ANIMALS)
        age[p] = rng.randint(5, 80)
        about = [f"{p} is in the {place[p]}.", f"{p} has a {color[p]} {animal[p]}.", f"{p} is {age[p]} years old."]
        rng.shuffle(about)
        facts += about
    rng.shuffle(facts)
    p, q = rng.sample(people, 2)
    form, yes = rng.randrange(4), rng.random() < 0.5
    if form == 3:
        yes, ask = age[p] > age[q], f"is {p} older than {q}"
    else:
        truth, words, ask = (
            (place[p], PLACES, f"is {p} in the {{}}"),
            (animal[p], ANIMALS, f"does {p} have a {{}}"),
            (color[p], COLORS, f"is the animal of {p} {{}}"),
        )[form]
        ask = ask.format(truth if yes else rng.choice([w for w in words if w != truth]))
    passage = " ".join(facts)
    prompt = f"{passage}\nQuestion: {ask}?\nAnswer:"
    return TaskItem("boolq", prompt, " yes" if yes else " no", (" no", " yes"), f"boolq:{passage}|{ask}")
