"""Trace formats and live replay."""
