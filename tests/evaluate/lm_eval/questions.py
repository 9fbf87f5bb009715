"""Invented items in the format of the eight benchmarks, with right and wrong responses."""

from __future__ import annotations

from typing import Any

CHOICES = {"A": "甲", "B": "乙", "C": "丙", "D": "丁"}
TREE = "class Leaf:\n    def __init__(self, size):\n        self.size = size\ndef size_of(leaf):\n    return leaf.size"
TREE = TREE.replace("\n", "\r\n")  # as in the real items
PAIR = r"\left( 3, \frac{\pi}{2} \right)"
ITEMS: dict[str, list[dict[str, Any]]] = {
    "cmmlu": [
        {"subject": "s", "Question": "第二个是", **CHOICES, "Answer": "B"},
        {"subject": "s", "Question": "第四个是", **CHOICES, "Answer": "D"},
    ],
    "boolq_dev": [
        {"question": "is water wet", "title": "t", "answer": True, "passage": "Water is wet."},
        {"question": "is stone wet", "title": "t", "answer": False, "passage": "Stone is dry."},
    ],
    "bbh": [
        {"task": "boolean_expressions", "input": "not False is", "target": "True"},
        {"task": "hyperbaton", "input": "Which?\nOptions:\n(A) one\n(B) two", "target": "(B)"},
        {"task": "dyck_languages", "input": "[ { <", "target": "> } ]"},
        {"task": "multistep_arithmetic_two", "input": "1 - 51 =", "target": "-50"},
        {"task": "word_sorting", "input": "List: pear fig apple", "target": "apple fig pear"},
        {"task": "formal_fallacies", "input": "Valid?", "target": "invalid"},
    ],
    "math500": [
        {"problem": "p", "solution": r"So $x$ is $\boxed{\frac{14}{3}}$.", "answer": r"\frac{14}{3}"},
        {"problem": "p", "solution": rf"Thus $\boxed{{{PAIR}}}.$", "answer": PAIR},
        {"problem": "p", "solution": r"We get \boxed{\text{Evelyn}}", "answer": r"\text{Evelyn}"},
        {"problem": "p", "solution": r"Hence $x=\boxed{5}$ in all.", "answer": "x=5"},
    ],
    "gsm8k_test": [
        {"question": "q", "answer": "He has 3 * 4 = <<3*4=12>>12 eggs.\nHe sells 2.\n#### 10"},
        {"question": "q", "answer": "That makes $2,125.\n#### 2,125"},
    ],
    "math401": [{"query": "9-15=", "response": "-6"}, {"query": "ln(264)=", "response": "5.5759"}],
    "humaneval": [
        {
            "task_id": "X/0", "entry_point": "twice", "prompt": 'import math\n\n\ndef twice(x):\n    """ 2 x. """\n',
            "canonical_solution": "    return int(2 * math.fabs(x)) if x > 0 else 2 * x\n",
            "test": "def check(candidate):\n    assert candidate(4) == 8\n    assert candidate(-1) == -2\n",
        },
    ],
    "mbpp": [
        {
            "task_id": 11, "text": "Write a class of leaves and their size.", "code": TREE, "challenge_test_list": [],
            "test_setup_code": "leaf = Leaf(3)", "test_list": ["assert size_of(leaf) == 3"],
        },
        {
            "task_id": 3, "text": "Of another split.", "code": "x = 1", "challenge_test_list": [],
            "test_setup_code": "", "test_list": ["assert x == 1"],
        },
    ],
}  # fmt: skip

# (file, item, response, right?)
RESPONSES = [
    ("cmmlu", 0, "B", True), ("cmmlu", 0, " B. 乙", True), ("cmmlu", 0, "答案是B。", True),
    ("cmmlu", 0, "A不对,所以答案为 B", True), ("cmmlu", 0, "A", False), ("cmmlu", 0, "Because", False),
    ("cmmlu", 0, "答案\uff1aC", False), ("cmmlu", 1, "选D", True), ("cmmlu", 1, "", False),
    ("boolq_dev", 0, "Yes, it is.", True), ("boolq_dev", 0, "no", False), ("boolq_dev", 0, "it is known", False),
    ("boolq_dev", 1, "One may say yes, but the answer is no.", True), ("boolq_dev", 1, "False", True),
    ("bbh", 0, "not False is True. So the answer is True.", True), ("bbh", 0, "So the answer is False.", False),
    ("bbh", 1, "(A) is wrong. So the answer is (B).", True), ("bbh", 1, "So the answer is B.", True),
    ("bbh", 1, "So the answer is (A), not (B).", False), ("bbh", 2, "So the answer is > } ]", True),
    ("bbh", 2, "So the answer is > ] }", False), ("bbh", 3, "The answer is -50.", True),
    ("bbh", 3, "The answer is 50.", False), ("bbh", 4, "so the answer is Apple fig  pear.", True),
    ("bbh", 4, "apple pear fig", False), ("bbh", 5, "So the answer is valid.", False),
    ("math500", 0, r"\boxed{\dfrac{14}{3}}", True), ("math500", 0, r"$\boxed{14/3}$", True),
    ("math500", 0, r"\boxed{\frac{14}{5}} is wrong, \boxed{\frac{14}3}", True), ("math500", 0, r"\boxed{14}", False),
    ("math500", 1, r"\boxed{(3,\frac{\pi}{2})}", True), ("math500", 1, r"\boxed{(3,\frac{\pi}{3})}", False),
    ("math500", 2, "The answer is Evelyn.", True), ("math500", 2, r"\boxed{Eve}", False),
    ("math500", 3, r"\boxed{5.0}", True), ("math500", 3, r"\boxed{-5}", False), ("math500", 3, "", False),
    ("gsm8k_test", 0, "3 * 4 is 12, less 2.\n#### 10.", True), ("gsm8k_test", 0, "It is 10.00 dollars", True),
    ("gsm8k_test", 0, "10 eggs and 12", False), ("gsm8k_test", 0, "none", False), ("gsm8k_test", 0, "", False),
    ("gsm8k_test", 1, "#### $2125", True), ("gsm8k_test", 1, "#### 2.125", False),
    ("math401", 0, "-6", True), ("math401", 0, "6", False), ("math401", 0, "9-15=-6.0004", True),
    ("math401", 1, "about 5.5764", True), ("math401", 1, "5.577", False),
    ("math401", 1, "The answer is 5.5759, not 6", False),
    ("humaneval", 0, "    return 2 * x\n", True), ("humaneval", 0, "    return 3 * x\n", False),
    ("humaneval", 0, "Sure:\n```python\ndef twice(x):\n    return math.floor(2 * x)\n```\nDone.", True),
    ("humaneval", 0, "    return 2 *", False), ("humaneval", 0, "    exit()\n", False), ("humaneval", 0, "", False),
    ("mbpp", 0, f"```python\n{TREE}\n```", True), ("mbpp", 0, TREE + "\n[DONE]\nnonsense", True),
    ("mbpp", 0, TREE.replace("leaf.size", "0"), False), ("mbpp", 0, "raise SystemExit(0)", False),
]  # fmt: skip
