"""What a test of gemmtune, or of something plugged into it, needs.

``backend_suite.BackendSuite`` and ``store_suite.StoreSuite``: suites to subclass. ``clock``: simulated time.
``hostile``: planted wrong kernels. ``hostile_backend``: candidates that crash, hang and fork. ``toy_compiler``: builds
that do. ``problems``: random Problems.
"""
