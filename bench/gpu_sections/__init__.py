"""Sections of the GPU check: each a function of a `Context` that answers with a dictionary."""
