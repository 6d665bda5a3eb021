"""Mutation operators: those of mutmut, and further operators for this code.

mutmut does not change conditions of `if`, calls whose result is unused, and SQL in strings.
Sentences for people are not mutated: strings in `raise`, and texts with spaces that are not SQL.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import libcst as cst
from mutmut.mutation.mutators import (
    OPERATORS_TYPE,
    mutation_operators,
    operator_arg_removal,
    operator_string,
)

# Patterns and replacements. A pattern does not match inside a longer operator.
_SQL_SWAPS = [
    (r"<=>", "="),
    (r"(?<![<=>!])<=(?!>)", "<"),
    (r"(?<![<=>!])>=", ">"),
    (r"(?<![<=>-])<(?![<=>])", "<="),
    (r"(?<![<=>-])>(?![<=>])", ">="),
    (r"(?<![<=>!:])=(?![<=>])", "<>"),
    (r"<>", "="),
    (r" \+ ", " - "),
    (r" - ", " + "),
    (r"\bAND\b", "OR"),
    (r"\bOR\b(?! REPLACE)", "AND"),
    (r"\bIS NOT NULL\b", "IS NULL"),
    (r"\bIS NULL\b", "IS NOT NULL"),
    (r"\bNOT (?=IN\b)", ""),
    (r"(?<!IS )(?<!WHEN )\bNOT (?!NULL|IN\b|MATCHED|EXISTS)", ""),
    (r" DESC\b", ""),
    (r"\bmin\(", "max("),
    (r"\bmax\(", "min("),
    (r"\bmin_by\(", "max_by("),
    (r"\bmax_by\(", "min_by("),
    (r"\bleast\(", "greatest("),
    (r"\bgreatest\(", "least("),
    (r"\blead\(", "lag("),
    (r"\blag\(", "lead("),
    (r"\bfirst\(", "last("),
    (r"\blast\(", "first("),
    (r"\bbool_or\(", "bool_and("),
    (r"\bbool_and\(", "bool_or("),
    (r"\bcoalesce\(", "nvl2("),
    (r"\brow_number\(", "rank("),
    (r"\bsum\(", "count("),
    (r"\bcount\(", "max("),
    (r"\bexists\(", "forall("),
    (r"\bforall\(", "exists("),
    (r"\btrue\b", "false"),
    (r"\bfalse\b", "true"),
    (r"\bCURRENT ROW\b", "UNBOUNDED FOLLOWING"),
    (r"\bUNBOUNDED FOLLOWING\b", "CURRENT ROW"),
    (r"\bleft_semi\b", "left_anti"),
    (r"(?<![\w.{])0(?![\w.}])", "1"),
    (r"(?<![\w.{])1(?![\w.}])", "2"),
]
_SWAPS = [(re.compile(pattern, re.IGNORECASE), text) for pattern, text in _SQL_SWAPS]

# These words mark a text with spaces as SQL. `and`, `or`, `not` and `from` are English too.
_SQL = re.compile(
    r"\b(select|where|partition by|order by|merge into|matched|is (not )?null|case when|cast\("
    r"|AS|AND|OR|NOT|IF\(|struct\(|OVER|DESC|set_config|pg_\w+)\b|::|<=>|\w\(|\w [<>=]=? \w"
)
# Without these calls, only a wider result remains.
_NARROWING = {"distinct", "where", "filter", "dropDuplicates", "limit", "sort", "orderBy"}


def _sql_variants(text: str) -> Iterable[str]:
    if not _SQL.search(text):
        return
    for pattern, replacement in _SWAPS:
        for match in pattern.finditer(text):
            yield text[: match.start()] + replacement + text[match.end() :]


def _string(node: cst.BaseString) -> Iterable[cst.BaseString]:
    if not isinstance(node, cst.SimpleString):
        return
    body = node.raw_value
    is_sql = False
    for changed in _sql_variants(body):
        is_sql = True
        start = len(node.prefix) + len(node.quote)
        yield node.with_changes(value=node.value[:start] + changed + node.quote)
    if not is_sql and " " not in body and "\n" not in body:
        yield from list(operator_string(node))[:1]


def _formatted_text(node: cst.FormattedStringText) -> Iterable[cst.FormattedStringText]:
    for changed in _sql_variants(node.value):
        yield node.with_changes(value=changed)


def _condition(node: cst.If) -> Iterable[cst.If]:
    test = node.test.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
    for operator, name in ((cst.And(), "False"), (cst.Or(), "True")):
        changed = cst.BooleanOperation(left=test, operator=operator, right=cst.Name(name))
        if not isinstance(node.test, cst.NamedExpr):
            # The original may be `if(`, without a space.
            space = cst.SimpleWhitespace(" ")
            yield node.with_changes(test=changed, whitespace_before_test=space)


def _unused_call(node: cst.Expr) -> Iterable[cst.Expr]:
    match node.value:
        case cst.Call(func=cst.Attribute(value=cst.Call(func=cst.Name("super")) as parent)):
            # The code of a method is replaced in place, which requires the same free variables.
            yield node.with_changes(value=parent)
        case cst.Call():
            yield node.with_changes(value=cst.Ellipsis())


def _arguments(node: cst.Call) -> Iterable[cst.Call]:
    """Replace an argument by None, or omit a named argument or the last argument.

    Without another argument, the later arguments would move. This is nearly always an error, which
    does not show whether the tests are good.
    """
    for changed in operator_arg_removal(node):
        if any(_is_sentence(a.value) and a not in changed.args for a in node.args):
            continue
        is_shorter = len(changed.args) < len(node.args)
        if not is_shorter or len(_names(node)) > len(_names(changed)) or _is_start(changed, node):
            yield changed


def _is_sentence(value: cst.BaseExpression) -> bool:
    match value:
        case cst.SimpleString():
            return " " in value.raw_value
        case cst.FormattedString():
            return any(
                isinstance(p, cst.FormattedStringText) and " " in p.value for p in value.parts
            )
        case _:
            return isinstance(value, cst.ConcatenatedString)


def _names(call: cst.Call) -> list[str]:
    return [argument.keyword.value for argument in call.args if argument.keyword is not None]


def _is_start(changed: cst.Call, call: cst.Call) -> bool:
    return all(a is b for a, b in zip(changed.args, call.args, strict=False))


def _narrowing_call(node: cst.Call) -> Iterable[cst.BaseExpression]:
    if isinstance(node.func, cst.Attribute) and node.func.attr.value in _NARROWING:
        yield node.func.value


_REPLACED = (operator_string, operator_arg_removal)

OPERATORS: OPERATORS_TYPE = [
    *((kind, operator) for kind, operator in mutation_operators if operator not in _REPLACED),
    (cst.Call, _arguments),
    (cst.BaseString, _string),
    (cst.FormattedStringText, _formatted_text),
    (cst.If, _condition),
    (cst.Expr, _unused_call),
    (cst.Call, _narrowing_call),
]
