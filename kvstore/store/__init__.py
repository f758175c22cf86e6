"""The owner of index, leases and residency: one file a flow."""
