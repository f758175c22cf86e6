"""Generated from kvstore.proto by `make proto`."""
