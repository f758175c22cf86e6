"""Every metric in one table, and `Metrics`, the recorder that counts them."""

from kvstore.metrics.recorder import Histogram, Metrics
from kvstore.metrics.table import COUNTER, GAUGE, HISTOGRAM, METHODS, TABLE

__all__ = ["COUNTER", "GAUGE", "HISTOGRAM", "METHODS", "TABLE", "Histogram", "Metrics"]
