"""Commands and metrics for the operator of a server: doctor, show, Prometheus."""
