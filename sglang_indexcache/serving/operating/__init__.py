"""Commands and metrics of whoever operates a server: doctor, show, Prometheus."""
