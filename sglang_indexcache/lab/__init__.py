"""Judge, train and time patterns: the laboratory beside the plugin.

Nothing on the other side of this folder (the pattern, its search, its serving) imports from it, and
its three rooms do not import each other: ``evaluate`` shows whether a pattern keeps quality,
``heal`` trains the indexers that it keeps, ``bench`` measures and predicts its speed.
"""
