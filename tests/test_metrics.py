"""Metrics: complete from the start, cheap, and one table for all."""

from __future__ import annotations

import re

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvstore.core.clock import perf_seconds
from kvstore.core.recorder import Recorder
from kvstore.metrics import COUNTER, HISTOGRAM, METHODS, TABLE, Histogram, Metrics
from kvstore.proto.v1 import kvstore_pb2


def scraped(metrics: Metrics) -> dict[str, float]:
    """Every sample of a scrape by its name and labels."""
    samples = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items()))
            samples[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return samples


def test_all_metrics_are_there_before_the_first_request() -> None:
    """Every metric of the table is scraped, at zero, with its known labels."""
    samples = scraped(Metrics())
    for row in TABLE:
        name = f"{row.name}_count" if row.kind == HISTOGRAM else row.name
        assert any(key.partition("{")[0] == name for key in samples), row.name
    others = {k: v for k, v in samples.items() if not k.startswith("kvstore_build_info")}
    assert set(others.values()) == {0.0}
    assert samples["kvstore_rpcs_total{method=Lookup,status=OK}"] == 0
    assert samples["kvstore_tier_capacity_bytes{tier=host}"] == 0


def test_names_say_what_and_in_which_unit() -> None:
    """Names are kvstore_<noun>, counters end in _total, histograms in their unit."""
    assert len({row.name for row in TABLE}) == len(TABLE)
    for row in TABLE:
        assert re.fullmatch(r"kvstore(_[a-z]+)+", row.name)
        assert row.name.endswith("_total") == (row.kind == COUNTER), row.name
        assert row.kind != HISTOGRAM or (row.name.endswith("_seconds") and row.buckets)
        assert row.help.endswith(".")


def test_methods_are_the_services() -> None:
    """The calls counted from the start are those of the wire contract."""
    services = kvstore_pb2.DESCRIPTOR.services_by_name.values()
    assert sorted(METHODS) == sorted(m.name for service in services for m in service.methods)


def test_recorder_methods_count() -> None:
    """What parts tell the recorder shows in a scrape."""
    metrics = Metrics()
    metrics.lookup("partial", 64, 48)
    metrics.hit("disk", 16)
    metrics.rpc("Lookup", "OK", 0.0004)
    metrics.rpc("Lookup", "NOT_FOUND")
    metrics.copied("staging>host", 4096, 0.002)
    metrics.evicted("host", "capacity", 3, 4096)
    metrics.set_tier("host", 100, 60, 30, 10, 5)
    metrics.limit_rejected("sessions")
    samples = scraped(metrics)
    assert samples["kvstore_lookups_total{result=partial}"] == 1
    assert samples["kvstore_lookup_tokens_total"] == 64
    assert samples["kvstore_hit_tokens_total{tier=host}"] == 48
    assert samples["kvstore_hit_tokens_total{tier=disk}"] == 16
    assert samples["kvstore_rpcs_total{method=Lookup,status=NOT_FOUND}"] == 1
    assert samples["kvstore_lookup_seconds_bucket{le=0.0005}"] == 1
    assert samples["kvstore_lookup_seconds_bucket{le=0.0002}"] == 0
    assert samples["kvstore_copied_bytes_total{link=staging>host}"] == 4096
    assert samples["kvstore_evicted_blocks_total{reason=capacity,tier=host}"] == 3
    assert samples["kvstore_evicted_bytes_total{reason=capacity,tier=host}"] == 4096
    assert samples["kvstore_tier_resting_bytes{tier=host}"] == 10
    assert samples["kvstore_limit_rejections_total{limit=sessions}"] == 1


def test_recorder_is_all_overridden() -> None:
    """Metrics counts everything that the silent recorder lets parts say."""
    calls = [name for name in vars(Recorder) if not name.startswith("_")]
    assert calls
    for name in calls:
        assert name in vars(Metrics), name


def test_instances_do_not_share() -> None:
    """Two stores in one process count apart."""
    one, two = Metrics(), Metrics()
    one.put_blocks("stored", 5)
    assert one.value("kvstore_put_blocks_total", "stored") == 5
    assert two.value("kvstore_put_blocks_total", "stored") == 0


@pytest.mark.parametrize(
    ("values", "quantile", "bound"),
    [([], 0.5, 0.0), ([0.5], 0.99, 1.0), ([0.5] * 99 + [5.0], 0.5, 1.0), ([9.0], 0.5, 10.0)],
)
def test_quantile_is_a_bucket_bound(values: list[float], quantile: float, bound: float) -> None:
    """A quantile is the upper bound of the bucket that it falls into."""
    histogram = Histogram((1.0, 10.0))
    for value in values:
        histogram.observe(value)
    assert histogram.quantile(quantile) == bound


def test_counting_a_lookup_is_cheap() -> None:
    """Counting costs a lookup less than 5 microseconds even on a busy machine."""
    metrics = Metrics()

    def burst() -> float:
        start = perf_seconds()
        for _ in range(2000):
            metrics.lookup("hit", 32, 16)
            metrics.rpc("Lookup", "OK", 0.0001)
        return (perf_seconds() - start) / 2000

    assert min(burst() for _ in range(5)) < 5e-6
