"""Words everybody uses: identity, blocks, plans, time, errors, configuration."""
