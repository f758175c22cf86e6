"""Connectors of inference engines: each module imports its engine only when it is used."""
