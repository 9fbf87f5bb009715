"""What counts as right on each task: the answer in a response, compared with the item's own."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any

from moebudget.integrations.lm_eval.sandbox import execute

Item = dict[str, Any]
NUMBER = re.compile(r"[-−]?\$?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?|[-−]?\.\d+")
SAYS = re.compile(r"(?:answer|result)(?:\s+is|\s*[:=])+\s*(.+)", re.IGNORECASE)


def number(text: str) -> Decimal | None:
    """The last number of a text, without thousands separators and currency; None if there is none."""
    found = NUMBER.findall(text)
    if not found:
        return None
    try:
        return Decimal(found[-1].replace(",", "").replace("$", "").replace("−", "-"))
    except InvalidOperation:
        return None


def said(response: str) -> str:
    """What follows the last "answer is" or "answer:", to the end of its line, else the last line with anything."""
    found = SAYS.findall(response)
    lines = [line for line in response.strip().splitlines() if line.strip()]
    return str(found[-1] if found else lines[-1] if lines else "").strip()


def gsm8k(item: Item, response: str) -> bool:
    """The number after ####, else the last one, equals that of the item."""
    part = response.rpartition("####")[2]
    return number(part) is not None and number(part) == number(item["answer"].rpartition("####")[2])


def math401(item: Item, response: str) -> bool:
    """The number said is within 1e-3 of the item's."""
    found, wanted = number(said(response)), number(item["response"])
    return found is not None and wanted is not None and abs(found - wanted) < Decimal("0.001")


def boxed(text: str) -> str | None:
    r"""What stands in the last \boxed{...} (or \boxed x), braces matched."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    rest = text[start:].partition("boxed" if text.startswith("\\boxed", start) else "fbox")[2].lstrip()
    if not rest.startswith("{"):
        return rest.split("$")[0].split()[0] if rest.split("$")[0].split() else None
    depth = 0
    for place, letter in enumerate(rest):
        depth += (letter == "{") - (letter == "}")
        if depth == 0:
            return rest[1:place]
    return None


def plain_math(text: str) -> str:
    r"""One spelling for the usual ones of a LaTeX answer: spaces, \left, \dfrac, \text, units, thousands, x = 5."""
    text = text.strip().strip("$").rstrip(".")
    text = re.sub(r"\\(?:left|right|,|!|;|:|quad|displaystyle|big|Big)(?![a-zA-Z])", "", text)
    text = re.sub(r"\\[dt]frac", r"\\frac", text)
    text = re.sub(r"\\(?:text|mathrm|textbf|mbox|mathbf)\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\frac\s*(?:\{([^{}]*)\}|(\d))\s*(?:\{([^{}]*)\}|(\d))", r"\\frac{\1\2}{\3\4}", text)
    text = re.sub(r"\\sqrt\s*(\w)", r"\\sqrt{\1}", text)
    text = re.sub(r"\^\s*\{?\\circ\}?|\\%|%|\\\$|\$|\\ ", "", text)
    text = re.sub(r"(?<=\d),(?:\\!)?(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"^[a-zA-Z]\s*=(?!=)\s*", "", text)
    text = re.sub(r"(?<![\w.])\.(?=\d)", "0.", text)
    return re.sub(r"\s+", "", text)


def _value(text: str) -> Decimal | None:
    """The value of a plain number or a fraction of two."""
    fraction = re.fullmatch(r"(-?)\\frac\{(-?\d+)\}\{(-?\d+)\}|(-?)(\d+)/(\d+)", text)
    try:
        if fraction is None:
            return Decimal(text)
        sign, top, bottom = fraction.groups()[:3] if fraction[2] else fraction.groups()[3:]
        return (Decimal(top) / Decimal(bottom)) * (-1 if sign else 1)
    except (InvalidOperation, ZeroDivisionError):
        return None


def math(item: Item, response: str) -> bool:
    r"""The last \boxed{}, else what is said to be the answer, equals the item's in one spelling or as a number."""
    inside = boxed(response)
    found, wanted = plain_math(said(response) if inside is None else inside), plain_math(item["answer"])
    if found == wanted:
        return True
    a, b = _value(found), _value(wanted)
    return a is not None and b is not None and abs(a - b) <= Decimal("1e-9")


def boolq(item: Item, response: str) -> bool:
    """The first yes or no (true or false) of what is said."""
    part = SAYS.findall(response)
    found = re.search(r"\b(yes|no|true|false)\b", part[-1] if part else response, re.IGNORECASE)
    return found is not None and bool(item["answer"]) == (found[1].lower() in ("yes", "true"))


def cmmlu(item: Item, response: str) -> bool:
    """The letter after 答案 or "answer", else the first A, B, C or D that stands alone."""
    stated = re.findall(
        r"(?:答案|选|answer)\s*(?:应该|应)?\s*(?:是|为|is)?\s*[:\uff1a]?\s*[(\uff08]?\s*([ABCD])(?![A-Za-z])", response
    )
    alone = re.search(r"(?<![A-Za-z])([ABCD])(?![A-Za-z])", response)
    letter = stated[-1] if stated else alone[1] if alone else None
    return letter == str(item["Answer"]).strip()


def bbh(item: Item, response: str) -> bool:
    """What is said to be the answer, without its full stop and case; for options the letter alone."""
    target, found = item["target"].strip(), said(response)
    option = re.fullmatch(r"\(([A-Z])\)", target)
    if option is not None:
        letters = re.findall(r"\(([A-Z])\)", found) or re.findall(r"(?<![A-Za-z])([A-Z])(?![A-Za-z])", found)
        return bool(letters) and letters[0] == option[1]
    spelled = (" ".join(text.strip().strip('"').rstrip(".").lower().split()) for text in (found, target))
    return len(set(spelled)) == 1


def python_of(response: str) -> str:
    """The last fenced block of a response, else the response, with line ends of one kind."""
    blocks = re.findall(r"```(?:python|py)?[ \t]*\r?\n(.*?)(?:```|\Z)", response, re.DOTALL)
    return str(blocks[-1] if blocks else response).replace("\r\n", "\n")


def humaneval(item: Item, response: str) -> bool:
    """The prompt continued by the response, or a response that defines the function itself, passes the check."""
    code = python_of(response)
    defined = re.search(rf"^(?:async )?def {re.escape(item['entry_point'])}\b", code, re.MULTILINE)
    before = item["prompt"] if defined is None else item["prompt"].partition(f"def {item['entry_point']}")[0] + "\n"
    return execute(f"{before}{code}\n{item['test']}\ncheck({item['entry_point']})\n").passed


def mbpp(item: Item, response: str) -> bool:
    """The response's code passes the item's assertions; set-up may use what the code defines, so it comes after."""
    code = python_of(response.partition("[DONE]")[0])
    return execute("\n".join([code, item["test_setup_code"], *item["test_list"], ""])).passed


RIGHT = {
    "cmmlu": cmmlu, "boolq": boolq, "bbh": bbh, "math": math, "gsm8k": gsm8k, "math401": math401,
    "humaneval": humaneval, "mbpp": mbpp,
}  # fmt: skip


def gold(task: str, item: Item) -> str:
    """A response that is right: the item's own answer as its data set words it."""
    if task == "boolq":
        return "yes" if item["answer"] else "no"
    field = {
        "cmmlu": "Answer", "bbh": "target", "math": "solution", "gsm8k": "answer", "math401": "response",
        "humaneval": "canonical_solution", "mbpp": "code",
    }[task]  # fmt: skip
    return str(item[field])
