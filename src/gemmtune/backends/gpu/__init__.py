"""The common part of the backends with GPU kernels of our own: rules, artifacts, launching. Not a backend itself."""
