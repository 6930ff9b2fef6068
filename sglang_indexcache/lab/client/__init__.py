"""Everything that talks to a running model: search, evaluation, benchmarks and demo ask through it.

``protocol`` says what a server reports and how an answer is believed, ``client`` is the HTTP side
of a server, ``launch`` starts one, ``score`` asks for log-probabilities of given tokens, ``pool``
keeps several servers busy, and ``stream`` times an answer as it arrives.
"""
