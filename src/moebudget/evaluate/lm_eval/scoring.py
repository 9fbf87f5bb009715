"""Scoring of the eight tasks: the answer in a response, compared with the answer of the item."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any

from moebudget.evaluate.lm_eval.sandbox import execute

Item = dict[str, Any]
NUMBER = re.compile(r"[-−]?\$?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?|[-−]?\.\d+")
SAYS = re.compile(r"(?:answer|result)(?:\s+is|\s*[:=])+\s*(.+)", re.IGNORECASE)


def number(text: str) -> Decimal | None:
    """The last number of a text, without thousands separators and currency; None if there is none."""
    numbers = NUMBER.findall(text)
    if not numbers:
        return None
    try:
        return Decimal(numbers[-1].replace(",", "").replace("$", "").replace("−", "-"))
    except InvalidOperation:
        return None


def said(response: str) -> str:
    """The text after the last "answer is" or "answer:" in its line, else the last line that is not empty."""
    stated = SAYS.findall(response)
    lines = [line for line in response.strip().splitlines() if line.strip()]
    return str(stated[-1] if stated else lines[-1] if lines else "").strip()


def gsm8k(item: Item, response: str) -> bool:
    """The number after ####, else the last number, equals the number of the item."""
    part = response.rpartition("####")[2]
    return number(part) is not None and number(part) == number(item["answer"].rpartition("####")[2])


def math401(item: Item, response: str) -> bool:
    """The stated number is within 1e-3 of the number of the item."""
    answer, wanted = number(said(response)), number(item["response"])
    return answer is not None and wanted is not None and abs(answer - wanted) < Decimal("0.001")


def boxed(text: str) -> str | None:
    r"""The contents of the last \boxed{...} (or \boxed x), with matched braces."""
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
    r"""A LaTeX answer in normal form: without spaces, \left, \text, units and "x =", \dfrac as \frac."""
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
    r"""The last \boxed{}, else the stated answer, equals the item's answer in normal form or as a number."""
    inside = boxed(response)
    answer, wanted = plain_math(said(response) if inside is None else inside), plain_math(item["answer"])
    if answer == wanted:
        return True
    a, b = _value(answer), _value(wanted)
    return a is not None and b is not None and abs(a - b) <= Decimal("1e-9")


def boolq(item: Item, response: str) -> bool:
    """The first yes or no (true or false) in the stated answer, else in the response."""
    part = SAYS.findall(response)
    word = re.search(r"\b(yes|no|true|false)\b", part[-1] if part else response, re.IGNORECASE)
    return word is not None and bool(item["answer"]) == (word[1].lower() in ("yes", "true"))


def cmmlu(item: Item, response: str) -> bool:
    """The letter after 答案 or "answer", else the first A, B, C or D that is not part of a word."""
    stated = re.findall(
        r"(?:答案|选|answer)\s*(?:应该|应)?\s*(?:是|为|is)?\s*[:\uff1a]?\s*[(\uff08]?\s*([ABCD])(?![A-Za-z])", response
    )
    alone = re.search(r"(?<![A-Za-z])([ABCD])(?![A-Za-z])", response)
    letter = stated[-1] if stated else alone[1] if alone else None
    return letter == str(item["Answer"]).strip()


def bbh(item: Item, response: str) -> bool:
    """The stated answer, ignoring case and a full stop; for options, the letter alone."""
    target, answer = item["target"].strip(), said(response)
    option = re.fullmatch(r"\(([A-Z])\)", target)
    if option is not None:
        letters = re.findall(r"\(([A-Z])\)", answer) or re.findall(r"(?<![A-Za-z])([A-Z])(?![A-Za-z])", answer)
        return bool(letters) and letters[0] == option[1]
    normalised = (" ".join(text.strip().strip('"').rstrip(".").lower().split()) for text in (answer, target))
    return len(set(normalised)) == 1


def python_of(response: str) -> str:
    """The last fenced block of a response, else the whole response, with Unix line ends."""
    blocks = re.findall(r"```(?:python|py)?[ \t]*\r?\n(.*?)(?:```|\Z)", response, re.DOTALL)
    return str(blocks[-1] if blocks else response).replace("\r\n", "\n")


def humaneval(item: Item, response: str) -> bool:
    """The prompt continued by the response, or a response that defines the whole function, passes the check."""
    code = python_of(response)
    defined = re.search(rf"^(?:async )?def {re.escape(item['entry_point'])}\b", code, re.MULTILINE)
    before = item["prompt"] if defined is None else item["prompt"].partition(f"def {item['entry_point']}")[0] + "\n"
    return execute(f"{before}{code}\n{item['test']}\ncheck({item['entry_point']})\n").passed


def mbpp(item: Item, response: str) -> bool:
    """The response's code passes the item's assertions. The set-up comes after the code, which it may use."""
    code = python_of(response.partition("[DONE]")[0])
    return execute("\n".join([code, item["test_setup_code"], *item["test_list"], ""])).passed


RIGHT = {
    "cmmlu": cmmlu, "boolq": boolq, "bbh": bbh, "math": math, "gsm8k": gsm8k, "math401": math401,
    "humaneval": humaneval, "mbpp": mbpp,
}  # fmt: skip


def gold(task: str, item: Item) -> str:
    """A correct response: the answer of the item as its data set words it."""
    if task == "boolq":
        return "yes" if item["answer"] else "no"
    field = {
        "cmmlu": "Answer", "bbh": "target", "math": "solution", "gsm8k": "answer", "math401": "response",
        "humaneval": "canonical_solution", "mbpp": "code",
    }[task]  # fmt: skip
    return str(item[field])
