"""The doors: gRPC servicers and the local lane, translating proto to core and back."""
