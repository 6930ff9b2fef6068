"""Commands and metrics of whoever operates a server: doctor, show, watch, Prometheus."""
