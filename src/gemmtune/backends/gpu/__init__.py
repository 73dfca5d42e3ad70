"""What the backends with GPU kernels of our own share: rules, artifacts, launching. Not a backend itself."""
