"""Code that Triton compiles; nothing here runs as Python but by Triton's interpreter."""
