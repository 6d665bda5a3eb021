"""The mutants of a module: SQL and conditions are mutated, but not sentences for people."""

from __future__ import annotations

import textwrap
from pathlib import Path

from pgcdc_assets_tests.mutation.mutants import mutants_of
from pgcdc_assets_tests.mutation.plugin import outer_functions


def _changes(tmp_path: Path, source: str) -> set[tuple[str, str]]:
    path = tmp_path / "module.py"
    path.write_text(textwrap.dedent(source))
    found = list(mutants_of(tmp_path, path))
    assert len({mutant.key for mutant in found}) == len(found)
    for mutant in found:
        assert compile(mutant.source, "mutant", "exec") != compile(path.read_text(), "", "exec")
    return {(mutant.before, mutant.after) for mutant in found}


def test_words_and_operators_of_sql_are_mutated_in_plain_and_formatted_strings(
    tmp_path: Path,
) -> None:
    changes = _changes(
        tmp_path,
        """
        def sql(key):
            return f"SELECT max(n) FROM t WHERE a <=> {key} AND b IS NOT NULL", "min(a) AS n"
        """,
    )
    before = 'return f"SELECT max(n) FROM t WHERE a <=> {key} AND b IS NOT NULL", "min(a) AS n"'
    for old, new in [
        ("max(n)", "min(n)"),
        ("<=>", "="),
        (" AND ", " OR "),
        ("IS NOT NULL", "IS NULL"),
        ("min(a)", "max(a)"),
    ]:
        assert (before, before.replace(old, new)) in changes


def test_conditions_and_calls_whose_result_is_unused_are_mutated(tmp_path: Path) -> None:
    changes = _changes(
        tmp_path,
        """
        def f(a):
            if a.is_odd:
                a.check()
            super().check(a)
            return a.rows.where(x).distinct()
        """,
    )
    assert changes >= {
        ("if a.is_odd:", "if (a.is_odd) and False:"),
        ("if a.is_odd:", "if (a.is_odd) or True:"),
        ("a.check()", "..."),
        ("super().check(a)", "super()"),
        ("return a.rows.where(x).distinct()", "return a.rows.where(x)"),
        ("return a.rows.where(x).distinct()", "return a.rows.distinct()"),
        ("return a.rows.where(x).distinct()", "return a.rows.where(None).distinct()"),
    }


def test_sentences_for_people_and_annotations_are_not_mutated(tmp_path: Path) -> None:
    changes = _changes(
        tmp_path,
        '''
        def f(a: "int") -> "str":
            """A sentence that is NULL and 1."""
            raise ValueError("it is not one of the two" f" and not {a}")
        ''',
    )
    assert changes == set()


def test_functions_with_decorators_and_module_level_are_mutated(tmp_path: Path) -> None:
    source = """
        LIMIT = 5

        class A:
            @property
            def n(self):
                return 1
    """
    assert {("LIMIT = 5", "LIMIT = 6"), ("return 1", "return 2")} <= _changes(tmp_path, source)
    functions = {mutant.function for mutant in mutants_of(tmp_path, tmp_path / "module.py")}
    assert functions == {"", "A.n"}
    code = compile(textwrap.dedent(source), "module", "exec")
    assert [found.co_qualname for found in outer_functions(code)] == ["A.n"]


def test_a_mutant_has_the_lines_of_its_statement_without_the_body(tmp_path: Path) -> None:
    source = """
        def f(a, b):
            if (
                a
                < b
            ):
                return g(
                    a,
                    b - 1,
                )
            for x in a:
                try:
                    h(x)
                except KeyError:
                    pass
            return "a AND b"
    """
    path = tmp_path / "module.py"
    path.write_text(textwrap.dedent(source))
    found = {(m.before, m.after): m for m in mutants_of(tmp_path, path)}
    for changed, line, statement in [
        (("a / < b", "a <= b"), 4, range(3, 7)),
        (("b - 1,", "b + 1,"), 9, range(7, 11)),
        (("h(x)", "..."), 13, range(13, 14)),
        (('return "a AND b"', 'return "a OR b"'), 16, range(16, 17)),
    ]:
        assert (found[changed].line, found[changed].statement) == (line, statement)


def test_arguments_and_decorators_of_functions_run_at_import(tmp_path: Path) -> None:
    source = """
        class A:
            @cache(1)
            def f(
                self, a: int = 2,
                b: int = 3
            ) -> int:
                def g(c=4):
                    return 5
                return 6
    """
    path = tmp_path / "module.py"
    path.write_text(textwrap.dedent(source))
    found = {(mutant.before, mutant.function) for mutant in mutants_of(tmp_path, path)}
    assert found == {
        ("self, a: int = 2,", ""),
        ("b: int = 3", ""),
        ("def g(c=4):", "A.f"),
        ("return 5", "A.f"),
        ("return 6", "A.f"),
    }
