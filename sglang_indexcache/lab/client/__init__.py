"""Clients of running servers, used by search, evaluation, benchmarks and the demo.

``http`` is a server's HTTP side, ``launch`` starts one, ``score`` asks for log-probabilities of
given tokens, ``pool`` keeps several servers busy, and ``stream`` times an answer as it arrives.
``serving/protocol.py`` says what a server reports, and which answers are believed.
"""
