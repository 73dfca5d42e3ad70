"""Tools for tests of gemmtune and of its plug-ins.

``backend_suite.BackendSuite`` and ``store_suite.StoreSuite`` are conformance suites to subclass. ``clock`` simulates
time and a GPU. ``hostile``, ``faults`` and ``lapsing`` have kernels that are wrong on purpose. ``hostile_backend`` and
``hostile_cuda`` have candidates that crash, hang or fork when they run; ``toy_compiler`` has candidates whose builds
do. ``problems`` makes random Problems.
"""
