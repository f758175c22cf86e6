"""Traces that come with the package; NOTICE says whose they are."""
