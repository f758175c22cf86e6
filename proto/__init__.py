"""The wire contract: package kvstore.v1 and the code generated from it."""
