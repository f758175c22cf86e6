"""Decides, never touches bytes: index, eviction policies, residency. Pure and clockless."""
