"""Mutants of C++ sources: where they can be, and the source that has all of them.

The text is enough to find them, since clang-format has set it: a binary operator has spaces on both
sides, and the brackets of a template have none. Whether the types of an operator allow its mutant
is left to the compiler (`mutant.h`). What is evaluated while compiling has none.
"""

from __future__ import annotations

import re
from typing import NamedTuple

BINARY = {
    "<": "Less",
    "<=": "LessEqual",
    ">": "Greater",
    ">=": "GreaterEqual",
    "==": "Equal",
    "!=": "NotEqual",
    "+": "Plus",
    "-": "Minus",
    "*": "Times",
    "/": "Divide",
    "%": "Modulo",
}
LIMITS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}  # the value beside
OPPOSITES = {"<": ">=", "<=": ">", ">": "<=", ">=": "<", "==": "!=", "!=": "=="}
OTHERS = {"+": "-", "-": "+", "*": "/", "/": "*", "%": "/"}

_TOKEN = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"(?P<d>[^(]*)\(.*?\)(?P=d)"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\''
    r"|^[ \t]*#(?:\\\n|[^\n])*",
    re.DOTALL | re.MULTILINE,
)
_OPERATOR = re.compile(r"(?<=[\w)\]}\"']) ([<>]=?|[=!]=|[-+*/%]|&&|\|\|)(?=[ \n])(?!\s+\.\.\.)")
_COMPILE_TIME = re.compile(
    r"\b(constexpr|static_assert|requires|template|using|concept|enum|case|operator|decltype|"
    r"noexcept|sizeof)\b"
)
_NO_STATEMENT = re.compile(
    r"(return|throw|if|else|for|while|do|switch|case|default|using|namespace|delete|new|goto|try|"
    r"catch|co_\w+|public|private|protected|static_assert|template|friend|static|const|auto)\b"
)
_NAME = re.compile(r"[A-Za-z_]\w*(::[A-Za-z_]\w*)*")
_ASSIGNMENT = re.compile(r"\s*([-+*/%&|^]|<<|>>)?=(?!=)")
_CLOSING = {"(": ")", "[": "]", "{": "}"}


class Mutant(NamedTuple):
    """One of the mutants of a source.

    Attributes:
        number: by which it is switched on.
        at: where in the text.
        line: from 1.
        change: what becomes what.
    """

    number: int
    at: int
    line: int
    change: str


def masked(text: str) -> str:
    """The same length and lines, with nothing in comments, strings and preprocessor lines."""

    def blank(match: re.Match[str]) -> str:
        found = match[0]
        quote = (
            found[-1] if found[-1] in "\"'" and not found.lstrip().startswith(("/", "#")) else ""
        )
        inside = re.sub(r"[^\n]", "_" if quote else " ", found)
        return quote + inside[1:-1] + quote if quote else inside

    return _TOKEN.sub(blank, text)


def _closed(code: str, at: int) -> int:
    """Behind the bracket that closes the one at `at`."""
    depth = 0
    for place in range(at, len(code)):
        if code[place] in "([{":
            depth += 1
        elif code[place] in ")]}":
            depth -= 1
            if depth == 0:
                return place + 1
    return len(code)


def _operand(code: str, at: int, *, ternary: bool = False) -> tuple[int, str]:
    """Where the left operand of a logical operator or `?` begins, and what is ahead of it."""
    depth = 0
    place = at - 1
    while place >= 0:
        char = code[place]
        if char in ")]}":
            depth += 1
        elif char in "([{":
            if depth == 0:
                return place + 1, char
            depth -= 1
        elif depth == 0:
            pair = code[place - 1 : place + 1]
            if char in ",;?" or (char == ":" and ":" not in (code[place - 1], code[place + 1])):
                return place + 1, char
            if not ternary and pair in ("&&", "||") and code[place + 1] in " \n":
                return place + 1, pair
            if char == "=" and code[place - 1] not in "=<>!" and code[place + 1] in " \n":
                return place + 1, char
            if char == "n" and re.search(r"\breturn$", code[max(0, place - 8) : place + 1]):
                return place + 1, "return"
        place -= 1
    return 0, ""


def _statement(code: str, at: int) -> bool:
    """Whether a call or an assignment begins here, which a program can do without."""
    if _NO_STATEMENT.match(code, at):
        return False
    if re.match(r"(break|continue);", code[at : at + 9]):
        return True
    place = at
    step = re.compile(r"(\+\+|--|\*)").match(code, place)
    place = step.end() if step else place
    if code[place : place + 1] == "(":
        place = _closed(code, place)
    else:
        name = _NAME.match(code, place)
        if not name:
            return False
        # A constructor, or a macro that declares; TORCH_CHECK... is one that calls.
        if re.match(r"([A-Z]\w*)\(", code[place:]) and not code.startswith("TORCH_CHECK", place):
            return False
        place = name.end()
    called = False
    while True:
        if code[place : place + 1] in ("(", "["):
            called = code[place] == "("
            place = _closed(code, place)
        elif link := re.compile(r"\s*(\.|->)\s*[A-Za-z_]\w*").match(code, place):
            called = False
            place = link.end()
        else:
            break
    if code[place : place + 1] == ";":
        return called or (step is not None and step[0] != "*")
    if not _ASSIGNMENT.match(code, place):
        return False
    depth = 0
    for char in code[place:]:
        depth += (char in "([{") - (char in ")]}")
        if depth < 0:
            return False  # an enumerator, a default
        if depth == 0 and char == ";":
            return True
    return False


def mutate(
    text: str, first: int, *, statements: bool, without: frozenset[int]
) -> tuple[str, list[Mutant]]:
    """The text with all of its mutants, and which there are.

    Args:
        text: of a source.
        first: the first number.
        statements: whether statements are left out too; not of headers, which declare.
        without: lines that stay as they are, since their mutants do not compile.
    """
    code = masked(text)
    inserted: list[tuple[int, int, str]] = []  # where, how many characters it replaces, what
    mutants: list[Mutant] = []
    number = first

    def line_of(at: int) -> int:
        return code.count("\n", 0, at) + 1

    def compile_time(at: int) -> bool:
        begin = max(code.rfind(char, 0, at) for char in ";{}")
        return _COMPILE_TIME.search(code, begin + 1, at) is not None

    def add(at: int, length: int, what: str, changes: dict[int, str], numbers: int = 1) -> None:
        nonlocal number
        line = line_of(at)
        if not compile_time(at) and line not in without:
            inserted.append((at, length, what.replace("NUMBER", str(number))))
            mutants.extend(Mutant(number + n, at, line, change) for n, change in changes.items())
        number += numbers  # also of lines without: the others keep their numbers

    plain = []  # operators that have mutants
    for match in _OPERATOR.finditer(code):
        operator, at = match[1], match.start(1)
        plain.append(at)
        if operator in ("&&", "||"):
            value = "true" if operator == "&&" else "false"
            operand = f" ::mutant::{value.capitalize()}<NUMBER>() |"
            add(match.end(1), 0, operand, {0: f"right of {operator}: {value}"})
            begin, ahead = _operand(code, at)
            if ahead not in ("&&", "||"):
                begin += len(code[begin:]) - len(code[begin:].lstrip())
                add(begin, 0, operand[1:] + " ", {0: f"left of {operator}: {value}"})
            continue
        changes = {}
        if operator in LIMITS:
            changes[0] = f"{operator} -> {LIMITS[operator]}"
        if operator in OPPOSITES:
            changes[1] = f"{operator} -> {OPPOSITES[operator]}"
        if operator in OTHERS:
            changes[0] = f"{operator} -> {OTHERS[operator]}"
        add(match.end(1), 0, f" ::mutant::{BINARY[operator]}<NUMBER>() {operator}", changes, 2)
    for match in re.finditer(r"(?<![\w)\]!])!(?=[\w(:*])", code):
        plain.append(match.start())
        add(match.start(), 1, "::mutant::Not<NUMBER>()->*", {0: "! left out"})

    def add_flip(begin: int, end: int) -> None:
        part = code[begin:end]
        begin += len(part) - len(part.lstrip())
        lines = range(line_of(begin), line_of(end) + 1)
        is_plain = part.strip() and not any(begin <= at < end for at in plain)
        if is_plain and not without.intersection(lines):
            add(end, 0, ")", {})
            add(begin, 0, "::mutant::flip<NUMBER>(", {0: "condition negated"})

    for match in re.finditer(r"\b(?:if|while) \(", code):
        end = _closed(code, match.end() - 1) - 1
        begin, ahead = _operand(code, end, ternary=True)
        if ahead in ("(", ";"):  # else it declares a variable
            add_flip(begin, end)
    for match in re.finditer(r"(?<=\s)\?(?= )", code):
        begin, _ = _operand(code, match.start(), ternary=True)
        add_flip(begin, match.start() - 1 if code[match.start() - 1] == " " else match.start())
    for match in re.finditer(r"\bstd::(min|max)(<[\w:]+>)?\(", code):
        other = "max" if match[1] == "min" else "min"
        what = f"::mutant::{match[1].capitalize()}<NUMBER>::of{match[2] or ''}("
        add(match.start(), len(match[0]), what, {0: f"std::{match[1]} -> std::{other}"})
    for match in re.finditer(r"\breturn (true|false)(?=;)", code):
        add(
            match.start(1),
            len(match[1]),
            f"::mutant::flip<NUMBER>({match[1]})",
            {0: f"not {match[1]}"},
        )
    if statements:
        for match in re.finditer(r"(?<=[;{}])\s+(?=[\w*+(-])", code):
            if _statement(code, match.end()):
                add(match.end(), 0, "if (!::mutant::on<NUMBER>()) ", {0: "statement left out"})

    # From the end. In one place: what replaces first, then from the inner one to the outer one.
    for at, length, what in sorted(inserted, key=lambda each: each[:2], reverse=True):
        text = text[:at] + what + text[at + length :]
    return text, mutants
