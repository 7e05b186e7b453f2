"""The dashboard, the documentation and the code name the same metrics and labels."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from vllm_dspark.integration.contract import installed_source
from vllm_dspark.integration.metrics_catalog import ENGINE_LABELS, catalog
from vllm_dspark.integration.metrics_docs import rewrite

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "configs/grafana/dspark.json"
PAGE = ROOT / "docs/metrics.md"

FUNCTIONS = {"sum", "rate", "max", "avg", "by", "histogram_quantile", "label_values", "increase"}
# Grafana's own words for "any series of this metric"
PLACEHOLDER = re.compile(r"\$__\w+|\$\w+|\$\{\w+\}")


def known_metrics() -> dict[str, frozenset[str]]:
    """Labels of every time series that exists, by name."""
    found = {}
    for family in catalog(7):
        labels = frozenset({*ENGINE_LABELS, *family.labels})
        for name in family.sample_names:
            found[name] = labels | ({"le"} if name.endswith("_bucket") else frozenset())
    stock = installed_source("v1/metrics/loggers.py") + installed_source(
        "v1/spec_decode/metrics.py"
    )
    for name in re.findall(r'"(vllm:[a-z_]+)"', stock):
        found.setdefault(name, frozenset(ENGINE_LABELS))
        found.setdefault(f"{name}_total", frozenset(ENGINE_LABELS))
    return found


@dataclass(frozen=True)
class Use:
    """One metric in a query: labels it selects by and is grouped by."""

    name: str
    labels: frozenset[str]


class QueryError(Exception):
    pass


TOKEN = re.compile(
    r"""(?P<string>"[^"]*") | (?P<number>\d+(\.\d+)?) | (?P<name>[a-zA-Z_][\w:]*)
      | (?P<range>\[[^\]]+\]) | (?P<operator>=~|!~|!=|[-+*/=(){},]) | (?P<space>\s+)""",
    re.VERBOSE,
)


def tokens(query: str) -> list[str]:
    """Tokens of a query; raises QueryError for what is no PromQL."""
    found, position = [], 0
    while position < len(query):
        match = TOKEN.match(query, position)
        if match is None:
            raise QueryError(f"unexpected {query[position:]!r}")
        if not match["space"]:
            found.append(match[0])
        position = match.end()
    depth = 0
    for token in found:
        depth += (token in ("(", "{")) - (token in (")", "}"))
        if depth < 0:
            raise QueryError("a bracket closes that never opened")
    if depth:
        raise QueryError("a bracket stays open")
    return found


def uses(query: str) -> Iterator[Use]:
    """Metrics of a query with the labels asked of them.

    `by (...)` belongs to the next aggregation, whose metrics all need those labels.
    """
    parts = tokens(PLACEHOLDER.sub("5m", query))
    grouping: frozenset[str] = frozenset()
    i = 0
    while i < len(parts):
        token = parts[i]
        if token == "by":
            end = parts.index(")", i)
            grouping = frozenset(parts[i + 2 : end : 2])
            i = end
        elif token in ("sum", "max", "avg"):
            grouping = frozenset()
        elif re.match(r"[a-zA-Z_]", token) and token not in FUNCTIONS:
            labels = grouping
            if parts[i + 1 : i + 2] == ["{"]:
                end = parts.index("}", i)
                labels |= frozenset(
                    a
                    for a, b in zip(parts[i:end], parts[i + 1 :], strict=False)
                    if b in ("=", "=~")
                )
                i = end
            yield Use(token, labels)
        i += 1


def check(query: str, legend: str = "") -> None:
    """Raise QueryError unless every metric, label and legend word of a query exists."""
    known = known_metrics()
    found = list(uses(query))
    if not found:
        raise QueryError(f"no metric in {query!r}")
    for use in found:
        if use.name not in known:
            raise QueryError(f"unknown metric {use.name}")
        if missing := use.labels - known[use.name]:
            raise QueryError(f"{use.name} has no label {sorted(missing)}")
    grouped = set(re.findall(r"by \(([^)]*)\)", query))
    shown = {label.strip() for group in grouped for label in group.split(",")}
    if missing := set(re.findall(r"\{\{(\w+)\}\}", legend)) - shown:
        raise QueryError(f"the legend shows {sorted(missing)}, which the query does not keep")


def dashboard() -> dict:
    return json.loads(DASHBOARD.read_text(encoding="utf-8"))


def targets() -> list[tuple[str, str, str]]:
    return [
        (panel["title"], target["expr"], target["legendFormat"])
        for panel in dashboard()["panels"]
        for target in panel.get("targets", [])
    ]


@pytest.mark.parametrize(("title", "query", "legend"), targets())
def test_query(title, query, legend):
    check(query, legend)


def test_variables():
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            metric, label = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]).groups()
            (use,) = uses(metric)
            check(metric)
            assert label in known_metrics()[use.name]


def test_every_metric_of_ours_is_shown():
    shown = {use.name for _, query, _ in targets() for use in uses(query)}
    missing = [f.full_name for f in catalog(7) if not shown & set(f.sample_names)]
    assert missing == []


def test_panels_do_not_overlap_and_have_ids_of_their_own():
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        box = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(box["x"], box["x"] + box["w"])
            for y in range(box["y"], box["y"] + box["h"])
        }
        assert not cells & taken, panel["title"]
        assert box["x"] + box["w"] <= 24
        taken |= cells


@pytest.mark.parametrize(
    ("query", "reason"),
    [
        ("sum (rate(vllm:dspark_drafted_total[5m]))", "unknown metric vllm:dspark_drafted_total"),
        ("sum (rate(vllm:dspark_probes[5m]))", "unknown metric vllm:dspark_probes"),
        ('vllm:dspark_ece{slot="1"}', r"no label \['slot'\]"),
        ("sum by (position) (rate(vllm:dspark_probes_total[5m]))", r"no label \['position'\]"),
        ("sum (rate(vllm:dspark_probes_total[5m])", "stays open"),
        ("1 + 1", "no metric"),
    ],
)
def test_a_wrong_query_is_noticed(query, reason):
    """The checks above can fail."""
    with pytest.raises(QueryError, match=reason):
        check(query)


def test_a_wrong_legend_is_noticed():
    with pytest.raises(QueryError, match="legend"):
        check("sum by (kind) (rate(vllm:dspark_steps_total[5m]))", "{{reason}}")


class TestDocumentation:
    def test_tables_are_those_of_the_code(self):
        """Run `python -m vllm_dspark.integration.metrics_docs docs/metrics.md` if this fails."""
        page = PAGE.read_text(encoding="utf-8")
        assert rewrite(page) == page

    def test_other_metrics_in_the_text_exist(self):
        known = known_metrics()
        families = {family.full_name for family in catalog(7)}
        named = set(re.findall(r"vllm:[a-z_]+", PAGE.read_text(encoding="utf-8")))
        assert {n for n in named if n not in known and n not in families} == {
            "vllm:dspark_"
        } & named

    def test_a_page_without_markers_is_refused(self):
        with pytest.raises(ValueError, match="exactly once"):
            rewrite("# Metrics")
