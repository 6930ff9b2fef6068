"""Find, judge, train and time patterns: the laboratory beside the plugin.

The pattern, the library, the kernels and serving import nothing from it. Its four rooms do not
import each other: ``search`` finds a pattern, ``evaluate`` shows whether it keeps quality, ``heal``
trains the indexers that it keeps, ``latency`` measures and predicts its speed. They share
``client``, ``runs``, ``data`` and ``stats``.
"""
